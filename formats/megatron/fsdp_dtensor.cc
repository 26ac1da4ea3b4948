// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/fsdp_dtensor.h"

#include <algorithm>
#include <string>
#include <utility>

#include "formats/encoding/torch_archive.h"
#include "formats/megatron/arguments.h"
#include "formats/megatron/names.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/checkpoint/state_key.h"

namespace reshard::megatron {
namespace {

constexpr std::string_view kArgs = "args";

// The same checkpoint and the config.json that was made of its args.
class ReaderWithConfig : public Reader {
 public:
  ReaderWithConfig(std::unique_ptr<Reader> inner, Json config) : inner_(std::move(inner)), config_(std::move(config)) {
    catalog_ = inner_->catalog();
    files_ = inner_->files();
  }

  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override {
    TRY(inner_->locate(tensors, threads, spool));
    const Catalog& found = inner_->catalog();
    catalog_.files = found.files;
    for (const std::size_t i : tensors) catalog_.tensor(i).take_location(found.tensors()[i]);
    return {};
  }

  Result<std::string> blob_bytes(const Blob& blob) override { return inner_->blob_bytes(blob); }
  std::string describe(const Blob& blob) override { return inner_->describe(blob); }

 protected:
  Result<std::optional<Json>> made_config() override { return std::optional(config_); }

 private:
  std::unique_ptr<Reader> inner_;
  Json config_;
};

// The model's tensors under Megatron's own names: "model.module.decoder.x" is decoder.x.
Result<Catalog> without_wrappers(const Catalog& catalog) {
  Catalog out;
  out.root = catalog.root;
  for (const Tensor& t : catalog.tensors()) {
    std::string_view name = t.name;
    while (take(name, "model.") || take(name, "module.")) {
    }
    if (split_state_key(t.name).kind != StateKind::kModel || out.find(name)) continue;
    Tensor bare;
    bare.name = name;
    bare.dtype = t.dtype;
    bare.model_dtype = t.model_dtype;
    bare.shape = t.shape;
    TRY(out.add(std::move(bare)));
  }
  return out;
}

Result<MadeConfig> config_of(Reader& reader, const Blob& blob) {
  const Catalog model = TRY(without_wrappers(reader.catalog()));
  if (!model.find(kEmbedding)) return MadeConfig();  // of another program, or renamed
  const auto document = TRY(torch_archive::read_object_item(TRY(reader.blob_bytes(blob))));
  return make_config(Arguments::read(document.root()), model);
}

}  // namespace

Result<std::unique_ptr<Reader>> with_config_of_args(std::unique_ptr<Reader> reader) {
  const auto& blobs = reader->catalog().blobs;
  const auto args = std::find_if(blobs.begin(), blobs.end(), [](const Blob& blob) { return blob.name == kArgs; });
  if (args == blobs.end() || TRY(path_exists(path_join(reader->catalog().root, kConfigFile)))) return reader;
  const auto made = config_of(*reader, *args);
  if (!made) return reader;  // the data are not here, or it is another program's object
  if (made->config)
    return std::unique_ptr<Reader>(std::make_unique<ReaderWithConfig>(std::move(reader), *made->config));
  if (!made->why_not.empty())
    reader->catalog().notes.push_back("No config.json can be made of args: " + made->why_not + ".");
  return reader;
}

}  // namespace reshard::megatron
