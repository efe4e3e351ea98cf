"""The service on Ray Serve with every setting from ``FXSERVE_*`` variables: ``serve build`` takes no builder.

serve build service.cluster.application:application -o serve.yaml
serve deploy serve.yaml
"""

from service.cluster.serve import app

application = app({})
