"""The process of one model, ``python -m attention_service.models.process``, or of one device of it.

``--spread``: of a model over several devices, of which it has the first and starts the processes of the others, which
have ``--follow``.
"""

import gc
import sys

from attention_service.models.process.unused_modules import leave_out

gc.disable()  # what is imported stays; looking for garbage in it takes an eighth of the time
SPREAD, FOLLOWS = "--spread" in sys.argv, "--follow" in sys.argv
leave_out(spread=SPREAD or FOLLOWS)

from attention_service.models.process.served_model import ServedModel, warm  # noqa: E402
from attention_service.models.process.turns import serve  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    if FOLLOWS:
        from attention_service.models.process.devices.follower import follow

        follow()
    elif SPREAD:
        from attention_service.models.process.devices.spread_model import SpreadModel

        serve(SpreadModel.load)
    else:
        serve(ServedModel.load, warm)
