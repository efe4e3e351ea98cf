"""The service on Ray Serve, configured only by ``FXSERVE_*`` variables: ``serve build`` does not accept a builder.

serve build service.cluster.application:application -o serve.yaml
serve deploy serve.yaml
"""

from service.cluster.serve import app

application = app({})
