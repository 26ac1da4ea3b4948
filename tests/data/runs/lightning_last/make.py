# SPDX-License-Identifier: Apache-2.0
# Makes checkpoints/ with Lightning 2.6: the best step of six, and the last in last.ckpt.
import torch, lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.layer = torch.nn.Linear(4, 4)
    def training_step(self, batch, i):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", float(self.global_step))   # rises: the first is the best
        return loss
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 4)), batch_size=2)
cb = ModelCheckpoint("checkpoints", monitor="loss", save_top_k=1, save_last=True, every_n_train_steps=1, filename="{epoch}-{step}")
L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[cb], logger=False, enable_progress_bar=False, enable_model_summary=False).fit(M(), data)
