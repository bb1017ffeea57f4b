"""A real server of the S3 protocol in this process, with keys of its own and one bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "homes"
KEYS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "kept-to-itself", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_served() -> Iterator[str]:
    """The address of an empty bucket; the environment says how it is reached for as long."""
    import boto3
    import s3fs
    from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}", "NO_PROXY": "127.0.0.1"}.items():
                patch.setenv(name, value)
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        # A client knows its server from when it was made.
        s3fs.S3FileSystem.clear_instance_cache()
        _cached_get_s3_client.cache_clear()
        server.stop()
