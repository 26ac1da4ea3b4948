// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <map>
#include <set>

#include "formats/nanotron/nanotron.h"
#include "formats/tensor_files/joined_tensor.h"
#include "lib/base/text.h"
#include "lib/model/packing.h"

namespace reshard::nanotron {
namespace {

constexpr Index kMaxJsonBytes = Index{1} << 20;
constexpr Index kMaxHeads = 65'536;
constexpr std::string_view kData = "data";

std::string metadata_of(const TensorFile& file, std::string_view key) {
  for (const auto& [name, value] : file.metadata())
    if (name == key) return value;
  return {};
}

class NanotronReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

 private:
  Result<std::optional<Json>> made_config() override;

  // A file of one parameter.
  struct ParameterFile {
    std::string path;  // relative to root
    FileName name;
  };

  Result<Json> read_json(std::string_view name);
  Status find_files();
  Status check_ranks(const std::string& parameter, const std::vector<ParameterFile>& files) const;
  Status read(const std::string& parameter, const std::vector<ParameterFile>& files, const OpenOptions& options);
  Result<Tensor> without_pairs(Tensor tensor) const;
  bool has_pairs() const;

  Json config_;
  std::map<std::string, std::vector<ParameterFile>> files_of_;  // by parameter
};

Result<Json> NanotronReader::read_json(std::string_view name) {
  const std::string path = path_join(catalog_.root, name);
  if (!TRY(path_exists(path))) return io_error(path + ": file is missing");
  catalog_.metadata_files.emplace_back(name);
  Json json = TRY(parse_json(TRY(read_whole_file(path, kMaxJsonBytes)), path));
  TRY(json.as_object().context(path));
  return json;
}

Status NanotronReader::find_files() {
  constexpr std::string_view kModel = "model";
  for (const Node& node : TRY(list_tree(path_join(catalog_.root, kModel)))) {
    if (node.is_directory()) continue;
    const std::size_t slash = node.name.rfind('/');
    const auto parsed = slash == std::string::npos ? std::nullopt : parse_file_name(base_name(node.name));
    const std::string path = path_join(kModel, node.name);
    if (!parsed) {
      catalog_.stale_files.push_back(path);
      continue;
    }
    std::string parameter = node.name.substr(0, slash);
    std::replace(parameter.begin(), parameter.end(), '/', '.');
    files_of_[parameter + "." + parsed->parameter].push_back({path, *parsed});
  }
  if (files_of_.empty()) return io_error(path_join(catalog_.root, kModel) + ": expected files of parameters, got none");
  return {};
}

// Fails unless a parameter has one file, or one for each rank of tensor parallelism.
Status NanotronReader::check_ranks(const std::string& parameter, const std::vector<ParameterFile>& files) const {
  const std::string where = path_join(catalog_.root, files.front().path);
  std::set<Index> there;
  for (const ParameterFile& file : files) {
    if (file.name.experts != 1)
      return unsupported(path_join(catalog_.root, file.path) + ": is of " + count_of(file.name.experts, "rank") +
                         " of expert parallelism, which is not read");
    if (file.name.ranks != files.front().name.ranks)
      return corrupt(path_join(catalog_.root, file.path) + ": expected a file of " +
                     count_of(files.front().name.ranks, "rank") + ", as " + files.front().path + " is");
    there.insert(file.name.rank);
  }
  for (Index rank = 0; rank < files.front().name.ranks; ++rank)
    if (!there.contains(rank))
      return io_error(where + ": the file of " + tensor_text(parameter) + " of tp rank " + std::to_string(rank) +
                      " of " + std::to_string(files.front().name.ranks) + " is missing");
  return {};
}

Status NanotronReader::read(const std::string& parameter, const std::vector<ParameterFile>& files,
                            const OpenOptions& options) {
  const IoFailureWatch watch;
  if (const Status complete = check_ranks(parameter, files); !complete)
    return leave_out(watch, complete.error(), {parameter});
  std::optional<JoinedTensor> joined;
  for (const ParameterFile& file : files) {
    const auto opened = TRY(open_if_whole(file.path, options));
    if (!opened) {
      catalog_.unread_files.back().tensors = {parameter};
      continue;
    }
    const OpenFile& open = *opened;
    const std::string where = catalog_.file_path(open.file);
    const auto& tensors = open.content->tensors();
    if (tensors.size() != 1 || tensors[0].name != kData)
      return corrupt(where + ": expected one tensor '" + std::string(kData) + "', got " +
                     count_of(std::ssize(tensors), "tensor"));
    const StoredTensor& stored = tensors[0].tensor;
    std::vector<LocalBox> boxes = {{whole(stored.shape()), Dims::filled(stored.shape().rank(), 0)}};
    Dims shape = stored.shape();
    if (file.name.ranks > 0) {
      shape = TRY(parse_shape(metadata_of(*open.content, "unsharded_shape")).context(where + ": unsharded_shape"));
      boxes = TRY(parse_slices(metadata_of(*open.content, "local_global_slices_pairs"), stored.shape(), shape)
                      .context(where + ": local_global_slices_pairs"));
    }
    if (!joined) joined.emplace(parameter, stored.dtype, shape, KeyPath{parameter});
    TRY(joined->check_same_whole(stored.dtype, shape).context(where));
    TRY(check_size(stored.dtype, shape).context(where));
    for (const LocalBox& box : boxes) joined->add(in_file(stored, open.file), box);
  }
  if (!joined) return {};
  const bool is_paired = has_pairs() && parameter.find(".attn.qkv_proj.") != std::string::npos;
  if (is_paired) return catalog_.add(TRY(without_pairs(std::move(joined->tensor))));
  return catalog_.add(std::move(joined->tensor));
}

// Returns whether q and k are in rotary pairs, which was the only layout before the option rope_interleaved.
bool NanotronReader::has_pairs() const {
  const Json* said = config_.find("rope_interleaved");
  return said == nullptr || !said->is_bool() || *said->as_bool();
}

// Returns the tensor with the rows of q and k in halves.
Result<Tensor> NanotronReader::without_pairs(Tensor tensor) const {
  const std::string where = path_join(catalog_.root, kConfigFile);
  const Index heads = TRY(config_.get_index("num_attention_heads").context(where));
  const Index width = TRY(config_.get_index("hidden_size").context(where));
  const Json* said = config_.find("num_key_value_heads");
  const Index kv_heads = said && said->is_integer() ? TRY(said->as_index()) : heads;
  if (heads < 1 || heads > kMaxHeads || kv_heads < 1 || kv_heads > heads || width < heads || width / heads % 2 != 0)
    return corrupt(where + ": " + count_of(heads, "head") + ", " + std::to_string(kv_heads) +
                   " of keys and values, of a hidden_size of " + std::to_string(width));
  const Index d = width / heads;
  const auto rows = checked_mul(heads + 2 * kv_heads, d);
  if (!rows || tensor.shape.rank() < 1 || tensor.shape[0] != *rows)
    return corrupt(catalog_.root + ": " + tensor_text(tensor.name) + ": expected " + std::to_string(heads) + " + 2 x " +
                   count_of(kv_heads, "head") + " of " + count_of(d, "row") + ", got shape " + to_string(tensor.shape));
  PackedPart all{tensor.name, tensor.shape, -1, {}, false, d};
  for (Index head = 0; head < heads + 2 * kv_heads; ++head) {
    const Index row = head * d;
    if (head >= heads + kv_heads) {
      all.rows.push_back({row, row, d, 1});
      continue;
    }
    all.rows.push_back({row, row, d / 2, 2});
    all.rows.push_back({row + d / 2, row + 1, d / 2, 2});
  }
  return unpack(tensor, all, tensor.name);
}

Status NanotronReader::open(const PathSnapshot& place, const OpenOptions& options) {
  const PathSnapshot* const step = TRY(step_directory(place));
  if (!step) return io_error(place.path() + ": expected a step of nanotron, or " + std::string(kLatestFile));
  catalog_.root = step->path();
  const Json metadata = TRY(read_json(kMetadataFile));
  config_ = TRY(read_json(kConfigFile));
  TRY(find_files());
  for (const auto& [parameter, files] : files_of_) TRY(read(parameter, files, options));
  const Json* version = metadata.find("version");
  catalog_.attributes.emplace_back(
      "format", "nanotron" + (version && version->is_string() ? " " + printable(TRY(version->as_string())) : "") +
                    ", " + count_of(std::ssize(catalog_.files), "file"));
  if (has_pairs()) catalog_.attributes.emplace_back("rows", "q and k were in rotary pairs (rope_interleaved)");
  if (step->has_directory("optimizer")) catalog_.attributes.emplace_back("optimizer", "its state is not read");
  return finish(options);
}

// Makes transformers' config: nanotron's LlamaConfig has members with the same names.
Result<std::optional<Json>> NanotronReader::made_config() {
  const Json* is_llama = config_.find("is_llama_config");
  if (!is_llama || !is_llama->is_bool() || !TRY(is_llama->as_bool())) return std::optional<Json>();
  Json architectures = Json::array();
  architectures.push_back("LlamaForCausalLM");
  Json config = Json::object();
  config.set("architectures", std::move(architectures)).set("model_type", "llama");
  for (const std::string_view member :
       {"attention_bias", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "initializer_range",
        "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
        "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings",
        "use_cache", "vocab_size"})
    if (const Json* value = config_.find(member)) config.set(member, *value);
  if (!catalog_.tensors().empty()) config.set("torch_dtype", info(catalog_.tensors().front().dtype).torch_name);
  return std::optional(std::move(config));
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<NanotronReader>(place, options);
}

}  // namespace reshard::nanotron
