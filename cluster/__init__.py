"""The serving side: gateway, dispatch, router, workers, configuration, commands."""
