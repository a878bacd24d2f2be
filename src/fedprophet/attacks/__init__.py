"""Attacks on images and on features."""

from fedprophet.attacks.pgd import pgd

__all__ = ["pgd"]
