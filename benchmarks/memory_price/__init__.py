"""What `benchmarks/memory.py` does, a file for each part.

`models` are measured with and without plans, iteration by iteration (`trials`), and as a whole with what does not fit
on disk (`swapping`). What was measured is kept and drawn by `pages`.
"""
