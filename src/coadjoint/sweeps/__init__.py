"""The only sequential code: forward, adjoint and tangent, one file for each engine."""
