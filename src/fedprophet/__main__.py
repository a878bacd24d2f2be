"""`python -m fedprophet` is the command `fedprophet`."""

from fedprophet.cli import main

main()
