"""The process of one model, ``python -m attention_service.models.process``, or of one device of it.

``--spread N``: of a model over N devices, of which it has the first and starts the processes of the others, which have
``--follow``.
"""

import gc
import sys
from functools import partial

from attention_service.models.process.devices.follower_processes import FOLLOW, start_followers
from attention_service.models.process.unused_modules import leave_out
from attention_service.models.worker_messages import SPREAD

gc.disable()  # what is imported stays; looking for garbage in it takes an eighth of the time
SPREADS, FOLLOWS = SPREAD in sys.argv, FOLLOW in sys.argv
followers = start_followers(int(sys.argv[-1])) if SPREADS else []  # they import while this process does
leave_out(spread=SPREADS or FOLLOWS)

from attention_service.models.process.served_model import ServedModel, warm  # noqa: E402
from attention_service.models.process.turns import serve  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    if FOLLOWS:
        from attention_service.models.process.devices.follower import follow

        follow()
    elif SPREADS:
        from attention_service.models.process.devices.spread_model import SpreadModel

        serve(partial(SpreadModel.load, followers))
    else:
        serve(ServedModel.load, warm)
