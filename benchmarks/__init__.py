"""It measures; its page says what was measured."""

import os

from flows.cli.main import spin_briefly

spin_briefly(os.environ)  # before a benchmark imports torch: it measures what a round has
