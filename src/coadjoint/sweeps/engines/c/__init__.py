"""Engine `cpu`: loops in C, made from the cell's formula by the system's compiler."""
