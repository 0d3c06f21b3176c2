"""Downloads that are whole and right, or not there at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from vprop._version import __version__
from vprop.lab.data.registry import DataFile

TIMEOUT_S = 20.0  # of silence, not in all: a large file over a slow line is fine
_CHUNK = 1 << 18


def download_file(file: DataFile, target: Path) -> str:
    """Download ``file`` to ``target``; return why it failed, or ``""``.

    Failures are returned rather than raised: the caller knows where else it looked, and says all of it at once.
    """
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(file.url, headers={"User-Agent": f"vprop/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return _save(response, file, target)
    except urllib.error.HTTPError as error:
        error.close()
        return f"failed: HTTP {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"failed: {error.reason}"
    except TimeoutError:
        return f"failed: no answer within {TIMEOUT_S:g} s"
    except http.client.HTTPException as error:
        return f"failed: {type(error).__name__} {error}".rstrip()
    except OSError as error:
        return f"failed: {error}"


def _save(response: Any, file: DataFile, target: Path) -> str:
    """Write to a temporary file beside ``target`` and rename it once the checksum is right.

    So no reader ever sees half a file, and two downloads at once do no harm.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    partial = Path(name)
    try:
        digest, received = hashlib.sha256(), 0
        with os.fdopen(handle, "wb") as stream:
            while chunk := response.read(_CHUNK):
                stream.write(chunk)
                digest.update(chunk)
                received += len(chunk)
        announced = response.headers.get("Content-Length", "")
        if announced.isdigit() and received < int(announced):  # read() ends in the same way when a connection breaks
            return f"failed: the connection closed after {received} of {announced} bytes"
        if digest.hexdigest() not in (file.sha256, *file.also_sha256):
            return f"gave the wrong checksum: expected sha256 {file.sha256}, found {digest.hexdigest()}"
        partial.chmod(0o644)  # mkstemp makes private files; a cache may be shared
        os.replace(partial, target)
        return ""
    finally:
        partial.unlink(missing_ok=True)  # also after Ctrl-C; gone already when all went well
