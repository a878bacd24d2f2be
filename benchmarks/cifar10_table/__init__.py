"""What `benchmarks/cifar10.py` does, a file for each part.

`cells` are what is run. `playing` plays them within a time, while `keeping` lays what they have so far elsewhere, and
says with `closing` what they reached. `bringing` takes finished runs into the repository, and `tables` (with its
`columns`) and `figure` are made of those.
"""
