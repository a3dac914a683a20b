"""Writes waves.csv: 300 noisy sine waves of 30 to 60 steps, slow or fast, to try `coadjoint train`
on.

    python examples/waves.py

The table has one row for each time step: the wave's id, the time, the height and the class.
"""

import csv
import math
import random

SPEEDS = {"slow": 0.2, "fast": 0.3}  # radians for each step


def main():
    random.seed(0)
    with open("waves.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "time", "height", "target"])
        for wave in range(300):
            kind = random.choice(sorted(SPEEDS))
            phase = random.uniform(0, 6)
            for t in range(random.randint(30, 60)):
                height = math.sin(phase + t * SPEEDS[kind]) + random.gauss(0, 0.3)
                table.writerow([wave, t, round(height, 3), kind])
    print("300 waves -> waves.csv")


if __name__ == "__main__":
    main()
