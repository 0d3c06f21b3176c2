"""Downloads that are whole and right, or not there at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vprop._version import __version__
from vprop.files import replacing
from vprop.lab.data.registry import DataFile

TIMEOUT_S = 20.0  # of silence, not in all: a large file over a slow line is fine


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
            content = response.read()
        found = hashlib.sha256(content).hexdigest()
        if found not in (file.sha256, *file.also_sha256):
            return f"gave the wrong checksum: expected sha256 {file.sha256}, found {found}"
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            part.write_bytes(content)
        return ""
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
