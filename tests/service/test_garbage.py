"""What is exempt from garbage collection, in a process of its own."""

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, gc, weakref
from service.app import create_app
from service.settings import Settings

class Cycle:
    def __init__(self):
        self.own = self

async def main():
    app = create_app(Settings(device="cpu", cache_dir=None))
    imported = weakref.ref(Cycle())
    async with app.router.lifespan_context(app):
        print(imported() is None, gc.get_freeze_count() > 100_000)
        later = weakref.ref(Cycle())
        gc.collect()
        print(later() is None)

gc.disable()
asyncio.run(main())
"""


@pytest.mark.exhaustive
def test_what_is_imported_is_exempt_and_what_is_made_later_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_the_collections_at_a_commands_end_have_nothing_to_visit() -> None:
    script = """
import atexit, gc, sys
from service.cli import main

atexit.register(lambda: print(100 * len(gc.get_objects()) < gc.get_freeze_count()))
sys.argv = ["fxserve", "check"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1] == "True", done.stderr
