"""The command line as `python -m coadjoint`."""

from __future__ import annotations

from .cli.program import main

if __name__ == "__main__":
    main()
