"""Orthogonal subspace fine-tuning in a plain training loop: `outsize.osft.AdamW(model, outsize.OSFT(...), lr=1e-4)`."""

from outsize.methods.osft.adamw import AdamW as AdamW
from outsize.methods.osft.adaptive import adaptive_ranks as adaptive_ranks
