import pytest

from tests.scale.ray.cluster import local_ray


@pytest.fixture(scope="session")
def url():
    with local_ray() as address:
        yield address
