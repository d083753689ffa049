"""The batch that a run's plan is for: the most expensive one that its data can produce."""

from collections.abc import Callable, Sequence
from typing import Any

from outsize.config.run import RunConfig
from outsize.data.collate import Collator, widest_batch
from outsize.data.packing import PackedRows
from outsize.data.rows import Rows
from outsize.data.vision import Vision, VisionCollator
from outsize.model.batch import is_mask
from outsize.model.packed_attention import VARLEN
from outsize.setup.batches import pad_to_shape

AnyCollator = Collator | VisionCollator


def collator_of(
    config: RunConfig, pad_id: int, tokens: int, vision: Vision | None, parts: Sequence[Any] = ()
) -> AnyCollator:
    """`tokens`: the length of padded rows under `pad_to_sequence_len`. `parts`: training and evaluation rows."""
    pad_to = tokens if config.pad_to_sequence_len else None
    if vision is not None:
        return VisionCollator(vision, pad_to)
    # Deterministic kernels take more memory for fewer documents: all batches then have as many as the planned one.
    least = _most_documents(parts) if config.full_determinism else 0
    return Collator(pad_id, pad_to, config.attn_implementation == VARLEN, least)


def batches_to_plan_for(
    config: RunConfig, collator: AnyCollator, parts: Sequence[Any], tokens: int, vocabulary: int
) -> Callable[[int], dict[str, Any]]:
    """The batch to plan for, by its number of rows. `parts`: training and evaluation rows. `tokens`: of the longest."""
    documents = documents_to_plan_for(config, parts, tokens)
    most_documents = _most_documents(parts)

    def batch_of(rows: int) -> dict[str, Any]:
        if isinstance(collator, VisionCollator):
            return _with_most_images(collator, parts, rows=rows, tokens=tokens)
        return widest_batch(
            collator,
            rows=rows,
            tokens=tokens,
            vocab_size=vocabulary,
            documents=documents,
            most_documents=most_documents,
        )

    return batch_of


def _most_documents(parts: Sequence[Any]) -> int:
    return max((part.most_documents for part in parts if isinstance(part, PackedRows)), default=0)


def documents_to_plan_for(config: RunConfig, parts: Sequence[Any], tokens: int) -> list[int] | None:
    """Lengths of the documents in each row, at least two: positions then restart, as in other batches.

    Masks take the same memory for any documents. Without masks, documents decide attention's time alone: the row's are
    those of the average row of the training data, or one document if the data are unknown.
    """
    if not config.sample_packing:
        return None
    if config.attn_implementation != VARLEN:
        return [-(-tokens // 2), tokens // 2]
    lengths = [int(n) for n in parts[0].average_row()] if parts else [tokens]
    return lengths if len(lengths) > 1 else [tokens - 1, 1]


def _with_most_images(collator: VisionCollator, parts: Sequence[Rows], *, rows: int, tokens: int) -> dict[str, Any]:
    """The rows whose images take most, filled up with text to `tokens`. Deterministic."""
    ranked = sorted(
        ((part, index) for part in parts for index in range(len(part))),
        key=lambda one: (one[0].media[one[0].documents[one[1]]].elements, one[0].lengths[one[1]]),
        reverse=True,
    )
    chosen = [ranked[n % len(ranked)] for n in range(rows)]
    batch: dict[str, Any] = pad_to_shape(collator([part[index] for part, index in chosen]), (rows, tokens))
    for name, value in batch.items():
        may_mask = name != "attention_mask" or rows > 1 or collator.pad_to is not None
        if is_mask(name) and may_mask and bool((value == 1).all()):
            value.view(-1)[-1] = 0  # a mask that masks something costs more
    return batch
