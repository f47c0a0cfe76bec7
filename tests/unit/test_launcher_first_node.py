"""Other nodes give the host of the rendezvous the time to join before they fill the round."""

import threading
import time

import pytest
from torch.distributed import HashStore

from resihp_ext.launcher.first_node import HostSign

pytestmark = pytest.mark.unit

MOMENT_S = 0.2
LIMIT_S = 10.0


def test_others_wait_until_the_host_has_joined() -> None:
    store = HashStore()
    host, other = HostSign(store, is_host=True), HostSign(store, is_host=False)
    waits = threading.Thread(target=other.wait)
    waits.start()
    waits.join(MOMENT_S)
    assert waits.is_alive()
    host.joined()
    waits.join(LIMIT_S)
    assert not waits.is_alive()


@pytest.mark.parametrize("hosts", [0, 1], ids=["nobody was told", "the host itself"])
def test_nobody_waits_in_vain(hosts: int) -> None:
    sign = HostSign(HashStore(), is_host=bool(hosts))
    began_s = time.monotonic()
    sign.wait()
    assert time.monotonic() - began_s < LIMIT_S
