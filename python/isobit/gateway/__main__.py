"""python -m isobit.gateway: see isobit.gateway.command."""

from isobit.gateway.command import main

if __name__ == "__main__":
    main()
