"""Settings of `pytest --nbval` for the notebooks."""

from kvshot_book.kernel import set_kernel_environment

set_kernel_environment()


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "output_timeout"):  # nbval's 5 s is hard-coded; a busy machine needs more
            item.output_timeout = 60
