// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/dist_reader.h"

#include <algorithm>
#include <array>
#include <set>

#include "formats/dcp/dcp.h"
#include "formats/megatron/names.h"
#include "formats/tensor_files/flat_runs.h"
#include "lib/base/text.h"

namespace reshard::megatron {
namespace {

constexpr std::string_view kCommonItem = "common_state/";

}  // namespace

// ---- Metadata

Status ShardedReader::read_metadata() {
  const std::string path = path_join(catalog_.root, kMetadataFile);
  if (!TRY(path_exists(path))) {
    catalog_.warnings.push_back(
        std::string(kMetadataFile) +
        " is missing, which is written last: the save did not finish, or was not copied completely.");
    return {};
  }
  catalog_.metadata_files.emplace_back(kMetadataFile);
  const Json json = TRY(parse_json(TRY(read_whole_file(path, Index{1} << 16)), path));
  const std::string_view backend = TRY(json.get_string("sharded_backend").context(path));
  if (backend != "torch_dist")
    return unsupported(path + ": sharded_backend: expected torch_dist, got " + printable(backend));
  return {};
}

// Reads the common dict with args, iteration and so on: a file of its own, or since 0.17 an item that is a list of one
// dict.
Status ShardedReader::read_common(const std::string& path) {
  if (TRY(path_exists(path))) {
    const auto file = TRY(files_.open(path));
    const Index size = TRY(file->size());
    common_ = TRY(TorchFile::open(*file, 0, size));
    common_file_ = static_cast<std::uint32_t>(inner_->catalog().files.size());
    inner_->catalog().files.push_back({std::string(kCommonFile), size});
    values_ = common_->root();
  } else {
    for (const Blob& blob : stored().blobs) {
      if (!blob.name.starts_with(kCommonItem)) continue;
      const auto file = TRY(files_.open(stored().file_path(blob.extent.file)));
      common_ = TRY(TorchFile::open_zip(*file, blob.extent.offset, blob.extent.length));
      common_file_ = blob.extent.file;
      values_ = common_->root();
      if (values_->kind() == pickle::Kind::kList && values_->size() == 1) values_ = (*values_)[0];
      has_common_item_ = true;
    }
  }
  if (!values_) {
    catalog_.warnings.push_back("There is neither " + std::string(kCommonFile) +
                                " nor an item common_state, so Megatron's arguments are unknown.");
    return {};
  }
  if (values_->kind() != pickle::Kind::kDict) return values_->mismatch("common state", "a dict");
  if (const auto args = values_->find("args")) args_ = Arguments::read(*args);
  degrees_ = TRY(degrees_of(args_).context(stored().file_path(common_file_)));
  return {};
}

// ---- What stored tensors are made of

// Finds the prefix of the model's names. NeMo uses its wrapper's: "module.decoder.layers.mlp.linear_fc1.weight".
void ShardedReader::find_wrapper() {
  for (const Tensor& tensor : stored().tensors()) {
    std::string_view name = tensor.name;
    while (take(name, "module.")) {
    }
    if (!name.starts_with(kLayers) && name != kEmbedding) continue;
    wrapper_ = tensor.name.substr(0, tensor.name.size() - name.size());
    return;
  }
}

void ShardedReader::find_recipes() {
  find_wrapper();
  recipes_.resize(stored().tensors().size());
  for (std::size_t i = 0; i < recipes_.size(); ++i) {
    const Tensor& tensor = stored().tensors()[i];
    Recipe& recipe = recipes_[i];
    std::string_view key = without_chain(tensor.name);
    recipe.model_shape = tensor.shape;
    if (is_optimizer_key(key)) {
      if (!take(key, "optimizer.state.")) continue;
      const std::size_t dot = key.find('.');
      if (dot == std::string_view::npos) continue;
      recipe.word = state_word(key.substr(0, dot));
      key = key.substr(dot + 1);
      const auto parameter = stored().find(key);
      if (!parameter) continue;
      recipe.model_shape = stored().tensors()[*parameter].shape;
      if (tensor.shape != recipe.model_shape) {
        const int rank = recipe.model_shape.rank();
        recipe.is_flat = tensor.shape.rank() == rank + 1 && volume(tensor.shape) == volume(recipe.model_shape);
        Index pieces = 1;  // at most as many pieces as elements
        for (int d = 0; recipe.is_flat && d < rank; ++d) {
          recipe.is_flat = tensor.shape[d] > 0 && recipe.model_shape[d] % tensor.shape[d] == 0;
          pieces *= tensor.shape[d];
        }
        recipe.is_flat =
            recipe.is_flat && volume(tensor.shape) > 0 && pieces <= kPartsPerPiece * std::ssize(tensor.fragments);
        if (!recipe.is_flat) continue;
      }
      if (kind_.empty()) kind_ = recipe.is_flat ? "fully_sharded_model_space" : "as";
    }
    take(key, wrapper_);
    recipe.stack = stack_of(stored(), wrapper_, key, recipe.model_shape);
    if (can_split(tensor, recipe.stack, recipe.model_shape)) recipe.kind = Recipe::Kind::kStack;
  }
}

// Places the parameters in the optimizer's flat buffers, as far as the model's shapes determine them.
void ShardedReader::place_buffers(const Gathered& model) {
  std::map<std::string, Dims> shapes;
  for (const auto& [name, origin] : model) shapes.emplace(name, origin.joined.tensor.shape);
  Buffers buffers = find_buffers({args_, degrees_, is_tied_, shapes}, stored());
  if (buffers.words.empty()) return;
  kind_ = "dp_reshardable";
  for (const auto& [i, word] : buffers.words) recipes_[i].word = word;
  if (!buffers.why_not.empty()) {
    catalog_.warnings.push_back("The optimizer's flat buffers (dp_reshardable) keep their names, and no parameter's: " +
                                buffers.why_not);
    return;
  }
  splits_pieces_ = true;  // halves of gated matrices share a piece, and the gaps between parameters belong to none
  for (auto& [i, places] : buffers.placed) {
    recipes_[i].kind = Recipe::Kind::kBuffer;
    recipes_[i].placed = std::move(places);
  }
}

// ---- Pieces

namespace {

// Returns layer or expert `index` of a piece.
Fragment slice_of(const Fragment& f, Index index, Index element_bytes) {
  Fragment out = f;
  out.start += (index - f.box.begin(0)) * f.strides[0] * element_bytes;
  out.box = {Dims(f.box.origin.span().subspan(1)), Dims(f.box.shape.span().subspan(1))};
  out.strides = Dims(f.strides.span().subspan(1));
  return out;
}

}  // namespace

// Emits a piece with the shape of the parameter's stored tensor, split by layer and expert.
Status ShardedReader::emit_piece(const Tensor& tensor, const Recipe& recipe, const Fragment& piece, const Sink& sink) {
  const Index eb = byte_size(tensor.dtype);
  const Stack& stack = recipe.stack;
  const Index layers = stack.by_layer ? piece.box.shape[0] : 1;
  const int expert_axis = stack.by_layer ? 1 : 0;
  const Index experts = stack.by_expert ? piece.box.shape[expert_axis] : 1;
  splits_pieces_ = splits_pieces_ || layers * experts > 1;
  for (Index l = 0; l < layers; ++l)
    for (Index e = 0; e < experts; ++e) {
      Fragment f = piece;
      Dims shape = recipe.model_shape;
      Index layer = 0, expert = 0;
      if (stack.by_layer) {
        layer = f.box.begin(0) + l;
        f = slice_of(f, layer, eb);
        shape = Dims(shape.span().subspan(1));
      }
      if (stack.by_expert) {
        expert = f.box.begin(0) + e;
        f = slice_of(f, expert, eb);
        shape = Dims(shape.span().subspan(1));
      }
      if (stack.half) {
        f.box.origin[0] += *stack.half;
        shape[0] *= 2;
      }
      const std::string name = stack.name(layer, expert);
      TRY(sink(name, shape, recipe.word.empty() ? KeyPath{name} : state_path(name, recipe.word), f));
    }
  return {};
}

Status ShardedReader::emit(std::size_t inner, const Sink& sink) {
  const Tensor& tensor = stored().tensors()[inner];
  const Recipe& recipe = recipes_[inner];
  if (recipe.kind == Recipe::Kind::kBuffer)
    return emit_buffer(tensor, recipe.placed, [&](const BufferedParameter& p, const Dims& shape, const Fragment& f) {
      return sink(p.name, shape, state_path(p.name, recipe.word), f);
    });
  for (const FragmentList* list : {&tensor.fragments, &tensor.replicas})
    for (std::size_t i = 0; i < list->size(); ++i) {
      const Fragment f = list->get(i);
      if (recipe.kind == Recipe::Kind::kAsItIs) {
        TRY(sink(tensor.name, tensor.shape, tensor.path.empty() ? KeyPath{tensor.name} : tensor.path, f));
        continue;
      }
      if (f.box.empty()) continue;
      if (!recipe.is_flat) {
        TRY(emit_piece(tensor, recipe, f, sink));
        continue;
      }
      // Flat pieces: each row of the last axis is a piece, or a run of one.
      const int rank = recipe.model_shape.rank();
      Dims local = recipe.model_shape;
      for (int d = 0; d < rank; ++d) local[d] /= tensor.shape[d];
      Index pieces = 1;
      for (int d = 0; d < rank; ++d) pieces *= f.box.shape[d];
      for (Index k = 0; k < pieces; ++k) {
        StoredTensor run;
        static_cast<Fragment&>(run) = f;
        run.dtype = tensor.dtype;
        Dims corner = Dims::filled(rank, 0);
        Index left = k;
        for (int d = rank; d-- > 0; left /= f.box.shape[d]) {
          const Index at = left % f.box.shape[d];
          run.start += at * f.strides[d] * byte_size(tensor.dtype);
          corner[d] = (f.box.begin(d) + at) * local[d];
        }
        for (Fragment& part : fragments_of_run(local, f.box.begin(rank), f.box.end(rank), run, 0)) {
          for (int d = 0; d < rank; ++d) part.box.origin[d] += corner[d];
          TRY(emit_piece(tensor, recipe, part, sink));
        }
      }
    }
  return {};
}

// Joins these stored tensors to tensors under their parameters' names, as far as they are located.
Status ShardedReader::gather(const std::vector<std::size_t>& inner, Gathered& out) {
  for (const std::size_t i : inner) {
    const Tensor& tensor = stored().tensors()[i];
    const std::string& word = recipes_[i].word;
    const bool is_state = !word.empty() && recipes_[i].kind != Recipe::Kind::kAsItIs;
    TRY(emit(i, [&](const std::string& parameter, const Dims& shape, const KeyPath& path, const Fragment& f) -> Status {
      const bool is_model = takes_masters_ && word == kMaster;
      const std::string name = is_state && !is_model ? state_name(parameter, word) : parameter;
      auto found = out.find(name);
      const bool is_new = found == out.end();
      if (is_new)
        found = out.emplace(name, Origin{JoinedTensor(name, tensor.dtype, shape, is_model ? KeyPath{name} : path), {}})
                    .first;
      std::vector<std::size_t>& origins = found->second.inner;
      if (origins.empty() || origins.back() != i) origins.push_back(i);
      Tensor& joined = found->second.joined.tensor;
      if (joined.shape != shape || joined.dtype != tensor.dtype)
        return corrupt(catalog_.root + ": " + tensor_text(tensor.name) + ": expected a part of " +
                       type_text(joined.dtype, joined.shape) + " '" + printable(name) + "', got one of " +
                       type_text(tensor.dtype, shape));
      joined.located = is_new ? tensor.located : joined.located && tensor.located;
      found->second.joined.add(f);
      return {};
    }));
  }
  return {};
}

Status ShardedReader::locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) {
  inner_->use_files(files_);
  std::set<std::size_t> wanted;
  for (const std::size_t i : tensors)
    if (!catalog_.tensors()[i].located)
      for (const std::size_t origin : origins_.at(catalog_.tensors()[i].name)) wanted.insert(origin);
  const std::vector<std::size_t> inner(wanted.begin(), wanted.end());
  const std::size_t warnings = stored().warnings.size();
  TRY(inner_->locate(inner, threads, spool));
  catalog_.warnings.insert(catalog_.warnings.end(), stored().warnings.begin() + warnings, stored().warnings.end());
  catalog_.files = stored().files;
  Gathered found;
  TRY(gather(inner, found));
  for (const std::size_t i : tensors) {
    Tensor& tensor = catalog_.tensor(i);
    const auto it = found.find(tensor.name);
    if (!tensor.located && it != found.end()) tensor.take_location(it->second.joined.tensor);
  }
  return {};
}

// ---- All of it

Status ShardedReader::open(const PathSnapshot& directory, const OpenOptions& options) {
  catalog_.root = directory.path();
  TRY(read_metadata());
  inner_ = TRY(dcp::open(directory, options));
  inner_->use_files(files_);
  TRY(read_common(path_join(catalog_.root, kCommonFile)));
  is_tied_ = !args_.flag("untie_embeddings_and_output_weights");
  takes_masters_ = options.weights == Weights::kMaster;
  const Catalog& from = stored();
  catalog_.metadata_files.insert(catalog_.metadata_files.end(), from.metadata_files.begin(), from.metadata_files.end());
  catalog_.stale_files = from.stale_files;
  catalog_.warnings.insert(catalog_.warnings.end(), from.warnings.begin(), from.warnings.end());
  catalog_.notes = from.notes;
  find_recipes();

  std::vector<std::size_t> model, state;
  for (std::size_t i = 0; i < recipes_.size(); ++i)
    (is_optimizer_key(without_chain(from.tensors()[i].name)) ? state : model).push_back(i);
  Gathered tensors, states;
  TRY(gather(model, tensors));
  place_buffers(tensors);
  TRY(gather(state, states));
  if (takes_masters_) {
    bool has_masters = false;
    for (const auto& [name, origin] : states) has_masters = tensors.erase(name) > 0 || has_masters;
    if (!has_masters)
      return unsupported(catalog_.root + ": --weights master: the checkpoint has no masters that can be read");
  }
  tensors.merge(states);
  for (auto& [name, origin] : tensors) {
    origins_.emplace(name, std::move(origin.inner));
    TRY(catalog_.add(std::move(origin.joined.tensor)).context(catalog_.root));
  }
  catalog_.files = from.files;
  TRY(add_values());
  TRY(add_steps());
  if (!catalog_.blobs.empty() && !has_common_item_)  // then the values are in this file
    catalog_.blobs.front().extent.length = catalog_.files[common_file_].size;
  TRY(add_blobs());
  catalog_.vocabulary = vocabulary_of(args_, catalog_);
  add_facts();
  catalog_.sort_by_name();
  catalog_.shares_extents = from.shares_extents || splits_pieces_;
  if (!options.validated) return {};
  return validate(catalog_, options.files_too);
}

void ShardedReader::add_facts() {
  const auto is_stacked = [](const Recipe& r) { return r.kind == Recipe::Kind::kStack && r.stack.by_layer; };
  const bool has_stacks = std::any_of(recipes_.begin(), recipes_.end(), is_stacked);
  const auto iteration = values_ ? values_->find("iteration") : std::nullopt;
  const auto number = iteration ? iteration->as_int() : std::nullopt;
  const std::string when = base_name(catalog_.root) == kRelease ? ", a release"
                           : number                             ? ", iteration " + std::to_string(*number)
                                                                : "";
  auto& facts = catalog_.attributes;
  facts.emplace_back("format", "Megatron-LM torch_dist" + when);
  const std::string args =
      has_common_item_ ? "an item common_state (Megatron core 0.17 or later)" : std::string(kCommonFile);
  std::string saved = args_.empty() ? "without args" : "on " + mesh_text(degrees_) + ", by args in " + args;
  saved += has_stacks ? "; all layers of a parameter in one tensor" : "; each layer's tensors apart";
  if (!kind_.empty()) saved += "; optimizer " + optimizer_text();
  facts.emplace_back("saved", saved + vocabulary_text(args_, catalog_));
  for (const auto& [key, value] : stored().attributes)
    if (key != "format") facts.emplace_back(key, value);
  if (const MadeConfig config = make_config(args_, catalog_); !config.config)
    catalog_.notes.push_back("No config.json can be made from args: " + config.why_not + ".");
}

// Returns the kind of the optimizer in Megatron's words, with an explanation.
std::string ShardedReader::optimizer_text() const {
  if (kind_ == "dp_reshardable") return "distributed, dp_reshardable: flat buffers of each tp rank and stage";
  if (kind_ == "fully_sharded_model_space")
    return "distributed, fully_sharded_model_space: flat pieces of each parameter";
  if (args_.flag("use_distributed_optimizer")) return "distributed, fully_reshardable: shaped as the parameters";
  return "plain: shaped as the parameters";
}

std::vector<std::string> ShardedReader::side_directories() const { return {catalog_.root, parent_path(catalog_.root)}; }

Result<std::optional<Json>> ShardedReader::made_config() { return make_config(args_, catalog_).config; }

Result<std::unique_ptr<Reader>> open_sharded(const PathSnapshot& directory, const OpenOptions& options) {
  return open_as<ShardedReader>(directory, options);
}

}  // namespace reshard::megatron
