"""Writing the migration that the tables owe. It compares `db/schema.py` with the newest migration.

python -m db.new_migration "what the migration does"
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from alembic import command
from alembic.script import ScriptDirectory

from db.engine import parse_url
from db.migrate import alembic_config

MIGRATIONS = Path(__file__).parent / "migrations"


def write_migration(message: str, folder: Path = MIGRATIONS) -> Path | None:
    """Write the migration from the newest one in `folder` to the tables of `db/schema.py`, and return its file; None,
    and no file, when the tables owe nothing. Its number is the newest one's plus one: `HEAD` has to name it."""

    def only_changes(_context: Any, _revision: Any, directives: list[Any]) -> None:
        if directives[0].upgrade_ops.is_empty():
            directives.clear()

    with tempfile.TemporaryDirectory() as place:
        url = parse_url(f"sqlite:///{Path(place) / 'migrated.db'}")
        config = alembic_config(url)
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        newest = ScriptDirectory.from_config(config).get_current_head() or "0"
        command.upgrade(config, "head")
        written: Any = command.revision(
            config,
            message,
            autogenerate=True,
            rev_id=f"{int(newest) + 1:04}",
            process_revision_directives=only_changes,
        )
        return Path(written.path) if written else None


if __name__ == "__main__":
    done = write_migration(" ".join(sys.argv[1:]) or "tables changed")
    print(f"{done}: read it, and set HEAD in db/schema.py" if done else "the tables owe no migration")
