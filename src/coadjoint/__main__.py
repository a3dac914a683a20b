"""python -m coadjoint"""

from .cli import main

if __name__ == "__main__":
    main()
