// SPDX-License-Identifier: Apache-2.0
#include "formats/megatron/legacy_reader.h"

#include <algorithm>
#include <tuple>

#include "formats/tensor_files/parameter_ids.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::megatron {

std::optional<Index> number_of(const KeyPath::value_type& key) {
  if (const auto* n = std::get_if<Index>(&key)) return *n;
  return parse_number(std::get<std::string>(key));
}

bool is_word(const KeyPath& path, std::size_t i, std::string_view word) {
  const auto* text = i < path.size() ? std::get_if<std::string>(&path[i]) : nullptr;
  return text != nullptr && *text == word;
}

std::string name_from(const KeyPath& path, std::size_t begin) {
  return dotted_name(KeyPath(path.begin() + begin, path.end()));
}

// ---- Files

namespace {

// Returns the number in "iter_0000010".
std::optional<Index> iteration_of(std::string_view directory) {
  constexpr std::string_view kPrefix = "iter_";
  if (!directory.starts_with(kPrefix)) return std::nullopt;
  return parse_number(directory.substr(kPrefix.size()));
}

// Returns {1, 3} for "mp_rank_01_003", or nothing for other names.
std::optional<std::vector<Index>> numbers_of(std::string_view name) {
  std::vector<Index> out;
  for (const std::string& part : split(name.substr(std::string_view("mp_rank_").size()), '_')) {
    const auto n = parse_number(part);
    if (!n) return std::nullopt;
    out.push_back(*n);
  }
  if (out.empty() || out.size() > 3) return std::nullopt;
  return out;
}

}  // namespace

// Opens the directories of ranks, mp_rank_TT[_PPP][_EEE]. args say whether a second number is a stage or an ep rank.
Status LegacyReader::find_ranks(const PathSnapshot& directory, const OpenOptions& options) {
  std::vector<std::pair<std::string, std::vector<Index>>> found;
  for (const DirectoryEntry& e : directory.entries()) {
    if (!e.is_directory || !is_rank_directory(e.name)) continue;
    auto numbers = numbers_of(e.name);
    if (!numbers) return corrupt(path_join(catalog_.root, e.name) + ": expected mp_rank_TT[_PPP][_EEE]");
    found.emplace_back(e.name, std::move(*numbers));
  }
  std::sort(found.begin(), found.end());
  for (const auto& [name, numbers] : found)
    if (numbers.size() != found.front().second.size())
      return corrupt(path_join(catalog_.root, name) + ": expected as many numbers in the name as in " +
                     found.front().first + ": the files are of two saves");
  for (auto& [name, numbers] : found) {
    LegacyRank rank;
    rank.directory = name;
    const std::string file = path_join(name, kModelFile);
    if (!TRY(path_exists(path_join(catalog_.root, file))))
      return io_error(path_join(catalog_.root, file) +
                      ": file is missing: the save did not finish, or was not copied completely");
    const auto open = TRY(open_if_whole(file, options));
    if (!open) continue;
    rank.file = open->file;
    rank.content = open->content;
    if (ranks_.empty()) {
      const auto root = open->content->root();
      const auto args = root ? root->find("args") : std::nullopt;
      if (args) args_ = Arguments::read(*args);
      if (args_.empty())
        return corrupt(catalog_.file_path(open->file) + ": args: expected Megatron's arguments, got " +
                       std::string(args ? pickle::kind_name(args->kind()) : "nothing"));
      degrees_ = TRY(degrees_of(args_).context(catalog_.file_path(open->file)));
      const std::size_t wanted = 1 + std::size_t{degrees_.pp > 1} + std::size_t{degrees_.ep > 1};
      if (numbers.size() != wanted)
        return corrupt(path_join(catalog_.root, name) + ": expected " + count_of(wanted, "number") +
                       " in the name, by args (" + mesh_text(degrees_) + ")");
    }
    rank.tp = numbers[0];
    if (degrees_.pp > 1) rank.stage = numbers[1];
    if (degrees_.ep > 1) rank.ep = numbers.back();
    ranks_.push_back(std::move(rank));
  }
  if (ranks_.empty()) return corrupt(catalog_.root + ": no rank's file can be read");
  std::stable_sort(ranks_.begin(), ranks_.end(), [](const LegacyRank& a, const LegacyRank& b) {
    return std::tie(a.stage, a.tp, a.ep) < std::tie(b.stage, b.tp, b.ep);
  });
  return {};
}

// Fails unless every part of every tensor is in a file. Only the (tp, ep) pairs that occur on a rank have a file.
Status LegacyReader::check_ranks() const {
  std::set<std::pair<Index, Index>> tp, ep;
  for (const LegacyRank& rank : ranks_) {
    if (rank.tp >= degrees_.tp || rank.stage >= degrees_.pp || rank.ep >= degrees_.ep)
      return corrupt(path_join(catalog_.root, rank.directory) + ": is not a rank of " + mesh_text(degrees_) +
                     " in args: the directory has files of two saves; copy those of one save");
    tp.emplace(rank.stage, rank.tp);
    ep.emplace(rank.stage, rank.ep);
  }
  const auto check = [&](const std::set<std::pair<Index, Index>>& there, Index ranks, std::string_view axis) -> Status {
    for (Index stage = 0; stage < degrees_.pp; ++stage)
      for (Index r = 0; r < ranks; ++r)
        if (!there.contains({stage, r}) && !is_partial())
          return io_error(catalog_.root + ": no file of " + std::string(axis) + " rank " + std::to_string(r) + " of " +
                          std::to_string(ranks) + (degrees_.pp > 1 ? " of stage " + std::to_string(stage) : "") +
                          ": its directory mp_rank_... is missing; args give " + mesh_text(degrees_));
    return {};
  };
  TRY(check(tp, degrees_.tp, "tp"));
  return check(ep, degrees_.ep, "ep");
}

// Fails unless a file is of the same save as the first one.
Status LegacyReader::check_rank(const LegacyRank& rank) const {
  const auto root = rank.content->root();
  if (!root || root->kind() != pickle::Kind::kDict)
    return corrupt(catalog_.file_path(rank.file) + ": expected a dict of torch.save");
  const auto iteration = root->find("iteration");
  const auto is = iteration ? iteration->as_int() : std::nullopt;
  if (iteration_ && is && *is != *iteration_)
    return corrupt(catalog_.file_path(rank.file) + ": expected iteration " + std::to_string(*iteration_) + ", got " +
                   std::to_string(*is) + ": the file is from another save; copy all files of one save");
  const auto args = root->find("args");
  const Degrees degrees =
      args ? TRY(degrees_of(Arguments::read(*args)).context(catalog_.file_path(rank.file))) : degrees_;
  if (degrees != degrees_)
    return corrupt(catalog_.file_path(rank.file) + ": expected args of " + mesh_text(degrees_) + ", got " +
                   mesh_text(degrees) + ": the file is from another save; copy all files of one save");
  const auto version = root->find("checkpoint_version");
  const auto number = version ? version->as_float() : std::nullopt;
  if (number && *number < 2)
    return unsupported(
        catalog_.file_path(rank.file) +
        ": checkpoint_version below 2: the rows of q, k and v are ordered differently; load and save it with a newer "
        "Megatron-LM");
  return {};
}

Status LegacyReader::read_ranks(const PathSnapshot& directory, const OpenOptions& options) {
  TRY(find_ranks(directory, options));
  const auto root = ranks_.front().content->root();
  iteration_ = iteration_of(base_name(catalog_.root));
  if (!iteration_)
    if (const auto said = root ? root->find("iteration") : std::nullopt) iteration_ = said->as_int();
  for (const LegacyRank& rank : ranks_) TRY(check_rank(rank));
  return check_ranks();
}

// ---- The model

namespace {

// Returns the number of the model chunk in "model" (0) or "model1", or nothing for other keys.
std::optional<Index> chunk_of(const KeyPath& path) {
  constexpr std::string_view kModel = "model";
  const auto* word = path.size() > 1 ? std::get_if<std::string>(&path[0]) : nullptr;
  if (word == nullptr || !word->starts_with(kModel)) return std::nullopt;
  return word->size() == kModel.size() ? 0 : parse_number(std::string_view(*word).substr(kModel.size()));
}

}  // namespace

// Finds the first layer of each chunk and stage. Chunk by chunk, the stages follow each other, and each counts its
// layers from 0.
Status LegacyReader::number_layers() {
  std::map<std::pair<Index, Index>, Index> layers;
  for (const LegacyRank& rank : ranks_)
    for (const TensorFile::Entry& entry : rank.content->tensors()) {
      const auto chunk = chunk_of(entry.path);
      if (!chunk) continue;
      const auto layer = parse_core_name(core_name(name_from(entry.path, 1))).layer;
      if (layer && *layer >= kMaxStack)
        return corrupt(catalog_.file_path(rank.file) + ": " + printable(entry.name) + ": more than " +
                       with_commas(kMaxStack) + " layers");
      Index& count = layers[{*chunk, rank.stage}];
      count = std::max(count, layer ? *layer + 1 : 0);
    }
  Index first = 0;
  for (const auto& [place, count] : layers) {
    first_layer_[place] = first;
    first += count;
  }
  const auto told = args_.number("num_layers");
  if (told && *told != first)
    return corrupt(catalog_.root + ": expected " + count_of(*told, "layer") + " as args say, got " +
                   std::to_string(first) + " in the files of all stages");
  return {};
}

Status LegacyReader::add_piece(const std::string& name, KeyPath path, DType dtype, const LegacyParameter& parameter,
                               const Dims& local, const std::vector<Fragment>& pieces) {
  const Dims shape = TRY(whole_shape(parameter.cut, local, parameter.ranks));
  auto found = tensors_.find(name);
  if (found == tensors_.end()) found = tensors_.emplace(name, JoinedTensor(name, dtype, shape, std::move(path))).first;
  JoinedTensor& whole = found->second;
  TRY(whole.check_same_whole(dtype, shape));
  const auto parts = parts_of_rank(parameter.cut, local, parameter.rank, parameter.ranks);
  for (const Fragment& piece : pieces)
    for (const LocalBox& part : parts)
      if (const auto held = in_whole(piece, part, byte_size(dtype))) whole.add(*held);
  return {};
}

Status LegacyReader::read_model(LegacyRank& rank) {
  Index local_experts = 0;
  for (const TensorFile::Entry& entry : rank.content->tensors())
    if (chunk_of(entry.path))
      if (const auto expert = parse_core_name(core_name(name_from(entry.path, 1))).expert)
        local_experts = std::max(local_experts, std::min(*expert, kMaxStack) + 1);
  const auto experts = args_.number("num_experts");
  if (local_experts > kMaxStack || (experts && local_experts > 0 && local_experts * degrees_.ep != *experts))
    return corrupt(catalog_.file_path(rank.file) + ": expected " +
                   count_of(experts.value_or(kMaxStack) / degrees_.ep, "expert") + " in a file of " +
                   mesh_text(degrees_) + ", got " + with_commas(local_experts));
  for (const TensorFile::Entry& entry : rank.content->tensors()) {
    const auto chunk = chunk_of(entry.path);
    if (!chunk || is_extra_state(entry.name)) continue;
    CoreName core = parse_core_name(core_name(name_from(entry.path, 1)));
    if (core.layer) core.layer = global_layer(rank, *chunk, *core.layer);
    if (core.expert) core.expert = rank.ep * local_experts + *core.expert;
    LegacyParameter parameter;
    parameter.is_expert = core.is_expert();
    parameter.name = core.text();
    if (is_tied_ && parameter.name == kHead) parameter.name = kEmbedding;  // a copy on the last stage
    parameter.ranks = core.is_expert() ? degrees_.etp : degrees_.tp;
    parameter.rank = core.is_expert() ? rank.tp % degrees_.etp : rank.tp;
    parameter.stored = entry.tensor;
    const auto cut = cut_of(parameter.name, is_gated_);
    if (!cut && parameter.ranks > 1) {
      unknown_.insert(parameter.name);
      continue;
    }
    parameter.cut = cut.value_or(Cut{});
    if (parameter.ranks == 1) parameter.cut = {};
    rank.parameters.push_back(std::move(parameter));
  }
  return {};
}

// Adds the parameters of all ranks; with `missing` only those that have no master.
Status LegacyReader::add_parameters(bool missing) {
  std::set<std::string> there;
  if (missing)
    for (const auto& [name, joined] : tensors_) there.insert(name);
  for (const LegacyRank& rank : ranks_)
    for (const LegacyParameter& p : rank.parameters)
      if (!there.contains(p.name))
        TRY(add_piece(p.name, {p.name}, p.stored.dtype, p, p.stored.shape(), {in_file(p.stored, rank.file)})
                .context(catalog_.file_path(rank.file) + ": parameter " + printable(p.name)));
  return {};
}

// ---- Values

// Adds the values of the first rank that all ranks share. Random states differ between ranks and are dropped.
Status LegacyReader::add_values(const LegacyRank& rank) {
  static constexpr std::array<std::string_view, 4> kExtra = {"iteration", "checkpoint_version", "opt_param_scheduler",
                                                             "num_floating_point_operations_so_far"};
  for (const TensorFile::Object& object : rank.content->objects()) {
    KeyPath path;
    if (const auto key = optimizer_key(object.path)) {
      if (!is_word(object.path, key->rest, "param_groups") || object.path.size() != key->rest + 3 ||
          is_word(object.path, key->rest + 2, "params"))
        continue;
      path = {std::string("optimizer" + (key->optimizer > 0 ? "_" + std::to_string(key->optimizer) : "")),
              std::string("param_groups"), object.path[key->rest + 1], object.path[key->rest + 2]};
    } else if (std::any_of(kExtra.begin(), kExtra.end(), [&](auto word) { return is_word(object.path, 0, word); })) {
      path = object.path;
      path.insert(path.begin(), std::string("extra_state"));
    } else {
      continue;
    }
    TRY(add_object(dotted_name(path), path, rank.file, object.value));
  }
  if (const auto root = rank.content->root())
    for (const auto& [name, count] : sample_counts(*root))
      TRY(add_object("extra_state." + name, {std::string("extra_state"), name}, rank.file, count));
  return {};
}

// ---- All of it

Status LegacyReader::open(const PathSnapshot& directory, const OpenOptions& options) {
  catalog_.root = directory.path();
  const Status done = read(directory, options);
  std::vector<std::string> buffers;
  for (const DirectoryEntry& e : directory.entries())
    if (const std::string file = path_join(e.name, kOptimizerFile);
        is_partial() && TRY(path_exists(path_join(catalog_.root, file))))
      buffers.push_back(file);
  TRY(find_more_damaged(buffers));
  return done;
}

Status LegacyReader::read(const PathSnapshot& directory, const OpenOptions& options) {
  TRY(read_ranks(directory, options));
  is_gated_ = args_.flag("swiglu");
  is_tied_ = !args_.flag("untie_embeddings_and_output_weights");
  takes_masters_ = options.weights == Weights::kMaster;
  TRY(number_layers());
  for (LegacyRank& rank : ranks_) TRY(read_model(rank));
  if (!takes_masters_) TRY(add_parameters(false));
  const auto buffers_of = [&](const LegacyRank& rank) {
    return path_join(catalog_.root, path_join(rank.directory, kOptimizerFile));
  };
  bool has_buffers = false;
  for (const LegacyRank& rank : ranks_) has_buffers = has_buffers || TRY(path_exists(buffers_of(rank)));
  for (const LegacyRank& rank : ranks_) {
    if (!left_out_.empty()) break;
    if (has_buffers && !TRY(path_exists(buffers_of(rank))))
      return io_error(buffers_of(rank) +
                      ": file is missing, which other ranks have: a part of the optimizer's state is in it");
    TRY(has_buffers ? read_distributed_optimizer(rank, options) : read_plain_optimizer(rank));
  }
  if (!left_out_.empty()) {
    std::erase_if(tensors_, [](const auto& t) { return split_state_key(t.first).kind == StateKind::kOptimizer; });
    catalog_.warnings.push_back("The optimizer's state is not read: " + left_out_);
  }
  if (takes_masters_) {
    if (optimizer_.empty() || !left_out_.empty())
      return unsupported(catalog_.root + ": --weights master: the checkpoint has no masters that can be read");
    TRY(add_parameters(true));
  }
  for (auto& [name, joined] : tensors_) TRY(catalog_.add(std::move(joined.tensor)).context(catalog_.root));
  tensors_.clear();
  if (!unknown_.empty())
    catalog_.warnings.push_back(names_text({unknown_.begin(), unknown_.end()}, "tensor") +
                                " left out: reshard does not know how tensor parallelism cuts tensors of such names");
  TRY(add_values(ranks_.front()));
  catalog_.attributes.emplace_back(
      "format", "Megatron-LM, per-rank files" + (iteration_ ? ", iteration " + std::to_string(*iteration_) : ""));
  catalog_.vocabulary = vocabulary_of(args_, catalog_);
  catalog_.attributes.emplace_back("saved",
                                   "on " + mesh_text(degrees_) + " by args" +
                                       (left_out_.empty() && !optimizer_.empty() ? "; optimizer " + optimizer_ : "") +
                                       vocabulary_text(args_, catalog_));
  if (const MadeConfig config = make_config(args_, catalog_); !config.config)
    catalog_.notes.push_back("No config.json can be made from args: " + config.why_not + ".");
  return finish(options);
}

Result<std::optional<Json>> LegacyReader::made_config() { return make_config(args_, catalog_).config; }

Result<std::unique_ptr<Reader>> open_rank_files(const PathSnapshot& directory, const OpenOptions& options) {
  return open_as<LegacyReader>(directory, options);
}

}  // namespace reshard::megatron
