"""make setup: what the whole test suite needs of the system, installed where we may, listed where we may not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGES = {
    # command: Debian package
    "bwrap": "bubblewrap",
    "python3": "python3",
    "node": "nodejs",
    "git": "git",
    "gcc": "gcc",
    "g++": "g++",
    "make": "make",
    "javac": "default-jdk-headless",
    "go": "golang-go",
    "rustc": "rustc",
    "perl": "perl",
    "slirp4netns": "slirp4netns",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "setpriv": "util-linux",
    "getfattr": "attr",
    "strace": "strace",
    "curl": "curl",
    "zsh": "zsh",
    "fish": "fish",
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
}
FILES = {
    "/usr/aarch64-linux-gnu/include/linux/openat2.h": "linux-libc-dev-arm64-cross",
    "/usr/include/linux/openat2.h": "linux-libc-dev",
}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> list[str]:
    """Packages whose program or file is not in the system's own directories."""
    wanted = [package for command, package in PACKAGES.items() if not shutil.which(command, path=SYSTEM_PATH)]
    wanted += [package for path, package in FILES.items() if not os.path.exists(path)]
    return sorted(set(wanted))


def _fetch_kernel() -> None:
    """The kernel that a virtual machine boots, to see limits hold under another kind of cgroup."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures"))
    from vm import kernel

    if kernel.find():
        return
    try:
        subprocess.run(["apt-get", "update", "-qq"], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kernel.fetch()
    except RuntimeError as error:
        print(f"no kernel for the virtual machine: {error}", file=sys.stderr)


def main() -> int:
    """Install, or say what is missing."""
    packages = missing()
    may_install = os.geteuid() == 0 and shutil.which("apt-get")
    if packages and may_install:
        print(f"installing {' '.join(packages)}", flush=True)
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        for command in (["apt-get", "update", "-qq"], install):
            done = subprocess.run(command, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                print(done.stdout[-3000:], file=sys.stderr)
                return 1
        packages = missing()
    if may_install:
        _fetch_kernel()
    if packages:
        print("these are missing, and the tests that need them will be skipped, or fail where HUTCH_MUST names them:")
        print(f"  apt install {' '.join(packages)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
