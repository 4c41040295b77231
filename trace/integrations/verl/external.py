"""``VERL_USE_EXTERNAL_MODULES=trackway.trace.integrations.verl.external`` traces verl by being imported."""

from .installing import install

install()
