"""Train a GPT: `python train.py [key=value ...]`; the keys are in conf/."""

from flashtrain import fit
from flashtrain.entry import main

if __name__ == "__main__":
    main(fit.run)
