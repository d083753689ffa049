"""Silences progress bars and remarks of transformers, such as those on special tokens and a changed save_steps."""

from transformers.utils import logging


def quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
