"""The probe as a package that `-m` runs."""

from probe import main

main()
