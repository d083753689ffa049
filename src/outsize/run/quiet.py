"""What other libraries print beside us: bars of their own, and remarks on what we do on purpose (special tokens that
Trainer aligns, a changed save_steps).
"""

from transformers.utils import logging


def quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
