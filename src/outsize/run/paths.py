"""Checks that the model and data of a run file exist. Imports no torch, so that a wrong path is reported at once."""

from outsize.config.run import RunConfig
from outsize.data.sources import require_data_path
from outsize.hub import require_model_path


def require_paths(config: RunConfig) -> None:
    require_model_path(config.base_model)
    for source in (*config.datasets, *config.test_datasets):
        require_data_path(source.path)
