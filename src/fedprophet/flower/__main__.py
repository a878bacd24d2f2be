"""`python -m fedprophet.flower` prints the folder of the Flower app: the argument of `flwr run`."""

from importlib.resources import files

if __name__ == "__main__":
    print(files("fedprophet.flower").joinpath("app"))
