"""python -m hutch"""

from .cli import main

raise SystemExit(main())
