"""`python -m worker`: how the supervisor starts its children."""

from worker.cli import main

if __name__ == "__main__":
    main()
