"""`python -m jaxpd` is the `jaxpd` command."""

from jaxpd.cli.main import main

if __name__ == "__main__":
    main()
