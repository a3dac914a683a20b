"""What to do with a trained network.

attribution   which entries of an input an output comes from: gradients and integrated gradients
explaining    the same for the sequences or samples of a file, by column and by step
explanation   what was found: arrays, a table and a summary in words
explained_page  the page that shows it
"""
