"""The probe as a module that `-m` runs."""

import probe

probe.main()
