"""What hutch promises, asked of the real thing: `hutch run` on this kernel, as root and as an ordinary user."""
