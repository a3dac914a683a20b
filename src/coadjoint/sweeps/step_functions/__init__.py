"""Step functions whose derivatives at all time steps come from one call.

row_rules     where samples lie in the result of an operation; those that mix them are refused
products      products over the rows of many time steps, compiled
tape          one call of a step with the rows of all time steps, its operations written down
lines         operations that are linear in one input, in few lines of code
linear_code   what is linear on a tape, as code for one step after the other
linearised    the derivatives of a step along a run
functions     states, adjoint and tangent sweep as operations that differentiate any number of times
"""
