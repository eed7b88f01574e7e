import signal

import pytest


@pytest.fixture
def listening():
    """Put back what listened to SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def quiet():
    """Leave out transformers' progress bars."""
    import transformers

    transformers.logging.disable_progress_bar()


@pytest.fixture
def register():
    """Register a conversion for as long as a test takes."""
    from transformers import conversion_mapping

    cache = conversion_mapping.get_checkpoint_conversion_mapping
    cache("legacy")  # builds it
    registered = conversion_mapping._checkpoint_conversion_mapping_cache
    before = dict(registered)

    def register_(class_name, *transforms):
        conversion_mapping.register_checkpoint_conversion_mapping(class_name, [*transforms], overwrite=True)

    yield register_
    registered.clear()
    registered.update(before)
    conversion_mapping.USER_REGISTERED_MAPPINGS.clear()
