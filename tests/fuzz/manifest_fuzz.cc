// Fuzzes a source's reshard_manifest.json next to a healthy model: checking it, and the files that it lets --force
// replace, end in an answer or an error.
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "formats/open.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/convert/source_manifest.h"
#include "lib/plan/plan.h"
#include "lib/source/tensor_source.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"
#include "tests/support/temp_dir.h"

namespace reshard::manifest_fuzz {
namespace {

// q has rows that families order differently.
constexpr std::string_view kHeader =
    R"({"model.embed_tokens.weight":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},)"
    R"("model.layers.0.self_attn.q_proj.weight":{"dtype":"F32","shape":[8,8],"data_offsets":[128,384]},)"
    R"("optimizer.state.model.norm.weight.exp_avg":{"dtype":"F32","shape":[8],"data_offsets":[384,416]}})";
constexpr std::size_t kDataBytes = 416;

bool write(const std::string& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return file.good();
}

const std::string& model_directory() {
  static const TempDir directory;
  static const bool is_made = [] {
    std::string file(8, '\0');
    file[0] = static_cast<char>(kHeader.size() & 0xff);
    file[1] = static_cast<char>(kHeader.size() >> 8);
    file += kHeader;
    for (std::size_t i = 0; i < kDataBytes; ++i) file += static_cast<char>(i % 61);
    return write(path_join(directory.path(), "model.safetensors"), file);
  }();
  require(is_made);
  static const std::string path = directory.path();
  return path;
}

}  // namespace

FUZZ_TARGET(manifest)(const std::uint8_t* data, std::size_t size) {
  const std::string& directory = model_directory();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  require(write(path_join(directory, kManifestFile), text));
  const auto recorded = files_of_manifest(directory);
  if (recorded && *recorded)
    for (const std::string& file : **recorded) require(is_safe_relative_path(file));

  static OpenCheckpoint open = *open_checkpoint(directory);
  static const Catalog& catalog = open.reader->catalog();
  static const Plan plan = [] {
    require(open.reader->locate({0, 1, 2}, 1, ".").has_value());
    return *make_plan(catalog, catalog);
  }();
  static const Model model =
      *recognise(catalog, {},
                 *ModelConfig::parse(
                     *parse_json(R"({"model_type": "llama", "vocab_size": 4, "hidden_size": 8, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16})",
                                 "config"),
                     "config"));
  RunOptions options;
  options.threads = 1;
  FileSource source(catalog, open.reader->files());
  static const std::vector<TensorProof> proofs = [&] {
    std::vector<DigestRequest> all;
    for (const PlannedTensor& t : plan.tensors) all.push_back({t.from, catalog.tensors()[t.from].dtype});
    return *digest_tensors(all, source, options);
  }();
  const auto manifest = SourceManifest::open(*open.reader, plan, catalog, {});
  if (!manifest) {
    require(!manifest.error().message().empty());
    return 0;
  }
  if (!*manifest) return 0;
  const auto held = (*manifest)->check(proofs, model, options);
  require(held ? *held >= 0 : !held.error().message().empty());
  return 0;
}

}  // namespace reshard::manifest_fuzz
