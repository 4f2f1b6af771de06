"""`python -m nlpconvert`."""

from nlpconvert.cli import main

if __name__ == "__main__":
    main()
