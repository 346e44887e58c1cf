"""The process of one model, ``python -m attention_service.models.process``."""

import gc

from attention_service.models.process.unused_modules import leave_out

gc.disable()  # what is imported stays; looking for garbage in it takes an eighth of the time
leave_out()

from attention_service.models.process.served_model import ServedModel, warm  # noqa: E402
from attention_service.models.process.turns import serve  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    serve(ServedModel.load, warm)
