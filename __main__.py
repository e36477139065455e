"""`python -m mt_resilient` is `mt-resilient`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
