// SPDX-License-Identifier: Apache-2.0
// Directories of training runs. See training_run.h.
#include "formats/training_run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <set>

#include "formats/bin/bin.h"
#include "formats/megatron/megatron.h"
#include "formats/numbered_optimizer.h"
#include "lib/base/file.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/names.h"
#include "lib/base/storage/storage.h"
#include "lib/base/text.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

constexpr std::size_t kMaxSteps = 10'000;                       // directories and files to look into
constexpr std::string_view kPipelineFile = "model_index.json";  // diffusers
constexpr std::string_view kModulesFile = "modules.json";       // sentence-transformers
constexpr int kMaxRunDepth = 4;  // lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt

// Accelerate's names for the parts that it saves, NeMo AutoModel's and LLaMA-Factory's.
struct PartWord {
  std::string_view text;
  bool is_model;
  bool is_fsdp;                // FSDP's state dicts, whose optimizer state is stored under names
  std::string_view extension;  // of a file; empty: a directory
  bool is_numbered = true;     // otherwise there is one, which counts only next to its optimizer
};
constexpr std::array<PartWord, 9> kPartWords = {{{"pytorch_model_fsdp", true, true, ""},
                                                 {"optimizer", false, true, ""},
                                                 {"pytorch_model_fsdp", true, true, ".bin"},
                                                 {"optimizer", false, true, ".bin"},
                                                 {"model", true, false, ".safetensors"},
                                                 {"pytorch_model", true, false, ".bin"},
                                                 {"model", true, true, "", false},
                                                 {"optim", false, true, "", false},
                                                 {"optimizer", false, true, "", false}}};

struct PartName {
  std::string name;
  const PartWord* word;
  Index number;
};

std::optional<PartName> parse_part(const DirectoryEntry& entry) {
  for (const PartWord& word : kPartWords) {
    std::string_view rest = entry.name;
    if (entry.is_directory != word.extension.empty() || !take(rest, word.text) || !rest.ends_with(word.extension))
      continue;
    rest.remove_suffix(word.extension.size());
    if (rest.empty() && (!word.extension.empty() || !word.is_numbered)) return PartName{entry.name, &word, 0};
    if (!word.is_numbered) continue;
    const auto number = take(rest, "_") && is_digits(rest) ? parse_number(rest) : std::nullopt;
    if (number && (*number > 0 || word.extension.empty())) return PartName{entry.name, &word, *number};
  }
  return std::nullopt;
}

struct RunParts {
  std::vector<PartName> models, optimizers;  // by their numbers
};

// Returns the parts that one way of saving left. A single model without FSDP is a checkpoint of its own format, not a
// part. If the first part is missing, the numbers are ranks, not parts.
RunParts parts_named(const std::vector<DirectoryEntry>& entries) {
  RunParts out;
  for (const PartWord& like : kPartWords) {
    if (!like.is_model) continue;
    out = {};
    for (const DirectoryEntry& entry : entries) {
      auto part = parse_part(entry);
      if (!part) continue;
      if (part->word == &like)
        out.models.push_back(*std::move(part));
      else if (!part->word->is_model && like.is_fsdp && part->word->extension == like.extension &&
               part->word->is_numbered == like.is_numbered)
        out.optimizers.push_back(*std::move(part));
    }
    const bool has_first =
        std::any_of(out.models.begin(), out.models.end(), [](const PartName& part) { return part.number == 0; });
    const bool has_optimizer = !out.optimizers.empty() || like.is_numbered;
    if (like.is_fsdp ? !out.models.empty() && has_optimizer : has_first && out.models.size() > 1) break;
    out = {};
  }
  for (auto* parts : {&out.models, &out.optimizers})
    std::sort(parts->begin(), parts->end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  return out;
}

// Returns the parts of a directory. A format may have directories "model" and "optimizer" of its own (ColossalAI), and
// other programs may have other files in them.
Result<RunParts> parts_of(const PathSnapshot& place) {
  RunParts out = parts_named(place.entries());
  if (out.models.empty() || out.models.front().word->is_numbered) return out;
  if (TRY(recognised_format(place))) return RunParts();
  for (const auto* alike : {&out.models, &out.optimizers})
    for (const PartName& part : *alike) {
      const PathSnapshot& there = *TRY(place.inside(part.name));
      const bool may_be_part = TRY(recognised_format(there)) || (!part.word->is_model && there.entries().empty());
      if (!may_be_part) return RunParts();
    }
  return out;
}

// Joins several checkpoints in one directory: its catalog has the files, tensors and objects of all.
class JoinedReader : public Reader {
 public:
  explicit JoinedReader(const std::string& path) { catalog_.root = path; }

  // Adds a part that was opened in `directory`, or "" for a file. Its names get `prefix`. Unless `optimizer` is empty,
  // it replaces the word "optimizer" at the beginning of names of optimizer state.
  Status add(const std::string& directory, std::unique_ptr<Reader> reader, const std::string& prefix,
             const std::string& optimizer) {
    reader->use_files(files_);
    parts_.push_back({directory, std::move(reader), {}});
    Part& part = parts_.back();
    const Catalog& from = part.reader->catalog();
    add_new_files(part);
    for (std::size_t i = 0; i < from.tensors().size(); ++i) {
      Tensor tensor = in_joined_files(part, from.tensors()[i]);
      rename(tensor, prefix, optimizer);
      if (tensor.path.empty()) tensor.path = {tensor.name};  // as the other parts' tensors have
      tensors_.emplace(tensor.name, std::pair(parts_.size() - 1, i));
      TRY(catalog_.add(std::move(tensor)));
    }
    for (std::size_t i = 0; i < from.blobs.size(); ++i) {
      Blob blob = from.blobs[i];
      blob.extent.file = part.file_of[blob.extent.file];
      for (Extent& copy : blob.copies) copy.file = part.file_of[copy.file];
      rename(blob, prefix, optimizer);
      blobs_.emplace(blob.name, std::pair(parts_.size() - 1, i));
      catalog_.blobs.push_back(std::move(blob));
    }
    for (const std::string& file : from.metadata_files) catalog_.metadata_files.push_back(path_join(directory, file));
    for (const std::string& file : from.stale_files) catalog_.stale_files.push_back(path_join(directory, file));
    for (const std::string& warning : from.warnings) {
      catalog_.warnings.push_back(directory.empty() ? warning : directory + ": " + warning);
      if (warning == from.shape_doubt) catalog_.shape_doubt = catalog_.warnings.back();
    }
    for (const std::string& note : from.notes)
      catalog_.notes.push_back(directory.empty() ? note : directory + ": " + note);
    for (UnreadFile file : from.unread_files) {
      for (std::string& name : file.tensors) name.insert(0, prefix);
      catalog_.unread_files.push_back(std::move(file));
    }
    catalog_.shares_extents = catalog_.shares_extents || from.shares_extents;
    catalog_.has_other_bytes = catalog_.has_other_bytes || from.has_other_bytes;
    if (parts_.size() == 1) catalog_.attributes = from.attributes;
    if (parts_.size() == 1) catalog_.header_metadata = from.header_metadata;
    return {};
  }

  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override {
    struct Request {
      std::vector<std::size_t> own, joined;  // places in the part's catalog, and in the joined one
    };
    std::vector<Request> wanted(parts_.size());
    for (const std::size_t i : tensors) {
      const auto [part, own] = tensors_.at(catalog_.tensors()[i].name);
      wanted[part].own.push_back(own);
      wanted[part].joined.push_back(i);
    }
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      Part& part = parts_[p];
      TRY(part.reader->locate(wanted[p].own, threads, spool));
      add_new_files(part);
      for (std::size_t n = 0; n < wanted[p].own.size(); ++n) {
        const Tensor found = in_joined_files(part, part.reader->catalog().tensors()[wanted[p].own[n]]);
        catalog_.tensor(wanted[p].joined[n]).take_location(found);
      }
    }
    return {};
  }

  Result<std::string> blob_bytes(const Blob& blob) override {
    const auto [reader, own] = origin_of(blob);
    return reader->blob_bytes(*own);
  }

  std::string describe(const Blob& blob) override {
    const auto [reader, own] = origin_of(blob);
    return reader->describe(*own);
  }

 private:
  struct Part {
    std::string directory;
    std::unique_ptr<Reader> reader;
    std::vector<std::uint32_t> file_of;  // in the joined catalog
  };

  // Takes the files that are new since the last call: the spool is created with the first item that needs it.
  void add_new_files(Part& part) {
    const auto& files = part.reader->catalog().files;
    for (std::size_t f = part.file_of.size(); f < files.size(); ++f) {
      part.file_of.push_back(static_cast<std::uint32_t>(catalog_.files.size()));
      catalog_.files.push_back({path_join(part.directory, files[f].path), files[f].size, files[f].writer});
    }
    for (std::size_t f = 0; f < files.size(); ++f) catalog_.files[part.file_of[f]].size = files[f].size;
  }

  static FragmentList moved(const Part& part, FragmentList list) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      Extent extent = list.extent(i);
      extent.file = part.file_of[extent.file];
      list.set_extent(i, extent);
    }
    return list;
  }

  static Tensor in_joined_files(const Part& part, Tensor tensor) {
    tensor.fragments = moved(part, tensor.fragments);
    tensor.replicas = moved(part, tensor.replicas);
    return tensor;
  }

  template <class Named>
  static void rename(Named& named, const std::string& prefix, const std::string& optimizer) {
    constexpr std::string_view kWritten = "optimizer.";
    const bool is_optimizer = !optimizer.empty() && named.name.starts_with(kWritten);
    if (!is_optimizer && prefix.empty()) return;
    named.name = is_optimizer ? optimizer + "." + named.name.substr(kWritten.size()) : prefix + named.name;
    named.path = {named.name};
  }

  std::pair<Reader*, const Blob*> origin_of(const Blob& blob) const {
    const auto& [part, i] = blobs_.at(blob.name);
    return {parts_[part].reader.get(), &parts_[part].reader->catalog().blobs[i]};
  }

  std::vector<Part> parts_;
  // The part of each tensor and object, and its index there, by name.
  std::unordered_map<std::string, std::pair<std::size_t, std::size_t>> tensors_, blobs_;
};

// ---- an optimizer that numbers its parameters, and its model

// Shapes of parameters, with the number of parameters of each. A numbered optimizer has no names, but its moments have
// the shapes of the parameters that it trains.
using Shapes = std::map<Dims, Index>;

// Returns the shape of the first moment of each number; empty if the states have names.
Shapes shapes_of_moments(const Catalog& catalog) {
  Shapes out;
  for (const Tensor& t : catalog.tensors()) {
    const StateKey key = split_state_key(t.name);
    if (key.kind == StateKind::kOptimizer && is_digits(key.parameter) &&
        (key.suffix == kMomentSuffix || key.suffix == ".momentum_buffer"))
      ++out[t.shape];
  }
  return out;
}

bool has_moments(const Catalog& catalog) {
  return std::any_of(catalog.tensors().begin(), catalog.tensors().end(),
                     [](const Tensor& t) { return split_state_key(t.name).suffix == kMomentSuffix; });
}

// Returns whether optimizer state has moments, and each has the name and the shape of one of the model's parameters.
bool has_names_of(const Catalog& model, const Catalog& optimizer) {
  const auto is_known = [&](const Tensor& t) {
    const StateKey key = split_state_key(t.name);
    const auto parameter = model.find(key.parameter);
    return key.suffix != kMomentSuffix || (parameter && model.tensors()[*parameter].shape == t.shape);
  };
  return has_moments(optimizer) && std::all_of(optimizer.tensors().begin(), optimizer.tensors().end(), is_known);
}

Shapes shapes_of_model(const Catalog& catalog) {
  Shapes out;
  for (const Tensor& t : catalog.tensors())
    if (split_state_key(t.name).kind == StateKind::kModel) ++out[t.shape];
  return out;
}

// Returns the shapes in `some` that exceed those in `all`.
Shapes without_shapes(Shapes some, const Shapes& all) {
  for (auto& [shape, count] : some)
    if (const auto found = all.find(shape); found != all.end()) count = std::max<Index>(0, count - found->second);
  std::erase_if(some, [](const auto& entry) { return entry.second == 0; });
  return some;
}

// If each of the shapes `cut` is one of n equal parts of a model's shape along some dimension, returns n; otherwise 0.
Index parts_of_shapes(const Shapes& cut, const Shapes& model) {
  constexpr Index kMostParts = 64;
  for (Index parts = 2; parts <= kMostParts; ++parts) {
    const auto is_part = [&](const auto& entry) {
      for (int d = 0; d < entry.first.rank(); ++d) {
        Dims whole = entry.first;
        whole[d] *= parts;
        if (model.contains(whole)) return true;
      }
      return false;
    };
    if (std::all_of(cut.begin(), cut.end(), is_part)) return parts;
  }
  return 0;
}

// Warns if an optimizer has moments of shapes that the model in `place` does not have. Sentence-transformers saves
// other modules in directories ("2_Dense"). The optimizer trains these too, so it is not compared with the model alone.
void compare_shapes(const PathSnapshot& place, const std::string& path, const Catalog& optimizer, const Catalog& model,
                    std::vector<std::string>& warnings) {
  if (place.has_file(kModulesFile)) return;
  const Shapes parameters = shapes_of_model(model);
  const Shapes others = without_shapes(shapes_of_moments(optimizer), parameters);
  if (others.empty() || parameters.empty()) return;
  Index count = 0;
  std::vector<std::string> texts;
  for (const auto& [shape, n] : others) {
    count += n;
    texts.push_back(to_string(shape));
  }
  const Index parts = parts_of_shapes(others, parameters);
  warnings.push_back(
      path + ": the moments of " + count_of(count, "parameter") + " have shapes that " + model.root +
      " has no tensors for: " + some_of(texts) +
      (parts > 0 ? ". They are one of " + std::to_string(parts) +
                       " parts, those of one tensor-parallel rank. The other ranks' moments are missing, and " +
                       "training cannot resume from them"
                 : ". They belong to another model, or to a part of one"));
}

// Opens the place that `look` returns; nothing if no checkpoint there can be opened.
template <class Look>
Result<std::optional<OpenCheckpoint>> open_beside(const Look& look) {
  std::optional<OpenCheckpoint> out;
  TRY(look_if_possible([&]() -> Status {
    const PathSnapshot& place = *TRY(look());
    const Format* const format = TRY(recognised_format(place));
    if (!format) return {};
    auto reader = TRY(format->open(place, {.files_too = false}));
    out = OpenCheckpoint{format, std::move(reader)};
    return {};
  }));
  return out;
}

// Compares numbered optimizer state with the model in the file's directory.
Status compare_with_model(const PathSnapshot& file, Catalog& catalog) {
  if (shapes_of_moments(catalog).empty()) return {};
  if (const auto model = TRY(open_beside([&] { return file.parent(); })))
    compare_shapes(*TRY(file.parent()), file.path(), catalog, model->reader->catalog(), catalog.warnings);
  return {};
}

}  // namespace

Result<std::optional<OpenCheckpoint>> open_parts(const PathSnapshot& place, const OpenOptions& options) {
  const RunParts parts = TRY(parts_of(place));
  if (parts.models.empty()) return std::optional<OpenCheckpoint>();
  OpenCheckpoint out;
  auto joined = std::make_unique<JoinedReader>(place.path());
  Catalog& catalog = joined->catalog();
  for (const auto* alike : {&parts.models, &parts.optimizers})
    for (const PartName& part : *alike) {
      const PathSnapshot& there = *TRY(place.inside(part.name));
      const Format* format = TRY(recognised_format(there));
      if (!format) return corrupt(there.path() + ": is empty or damaged: the save did not finish");
      if (!out.format) out.format = format;
      const std::string number = "_" + std::to_string(part.number);
      const std::string model = part.word->is_model && parts.models.size() > 1 ? "model" + number : "";
      if (!model.empty()) catalog.parts.push_back({StateKind::kModel, model + ".", model, part.name});
      auto reader = TRY(format->open(there, options));
      const bool is_bare = !part.word->is_model && is_bare_optimizer(reader->catalog());
      const std::string prefix = is_bare ? "optimizer." : model.empty() ? "" : model + ".";
      TRY(joined->add(part.word->extension.empty() ? part.name : "", std::move(reader), prefix,
                      parts.optimizers.size() > 1 ? "optimizer" + number : ""));
    }
  catalog.lacks_optimizer = parts.optimizers.empty();
  catalog.sort_by_name();
  out.reader = std::move(joined);
  return std::optional(std::move(out));
}

Result<const PathSnapshot*> checkpoint_of_step(const PathSnapshot& place) {
  constexpr std::string_view kCheckpoint = "model_and_optim";
  return place.has_directory(kCheckpoint) ? place.inside(kCheckpoint) : Result<const PathSnapshot*>(nullptr);
}

namespace {

// Returns the files of numbered optimizer state in a directory whose model was opened without them.
std::vector<std::string> optimizers_beside(const PathSnapshot& place, const Catalog& model) {
  std::set<std::string_view> read;
  for (const CatalogFile& file : model.files) read.insert(file.path);
  std::vector<std::string> out;
  for (const DirectoryEntry& entry : place.entries()) {
    const auto part = parse_part(entry);
    const bool is_optimizer = part ? !part->word->is_model : !entry.is_directory && entry.name == "optimizer.pt";
    if (is_optimizer && !entry.is_directory && !read.contains(entry.name)) out.push_back(entry.name);
  }
  return out;
}

// Joins the optimizer to the model if it has the parameters' names (`is_named`) or its numbers can be given them.
// Returns why not: a clause, or nothing.
Result<std::string> join_optimizer(OpenCheckpoint& model, OpenCheckpoint optimizer, const std::string& config,
                                   bool is_named) {
  constexpr std::string_view kTorchSave = "bin";
  const std::vector<Tensor>& state = optimizer.reader->catalog().tensors();
  if (!std::all_of(state.begin(), state.end(), [](const Tensor& t) { return t.located; }))
    return std::string("its moments are in a form that reshard does not read");
  const bool is_ordered = model.format->name == kTorchSave;
  NamedOptimizer named = is_named
                             ? NamedOptimizer{std::move(optimizer.reader), {}}
                             : with_parameter_names(std::move(optimizer.reader), *model.reader, config, is_ordered);
  if (!named.reader) return named.why_not;
  auto joined = std::make_unique<JoinedReader>(model.reader->catalog().root);
  TRY(joined->add("", std::move(model.reader), "", ""));
  TRY(joined->add("", std::move(named.reader), "", ""));
  joined->catalog().sort_by_name();
  model.reader = std::move(joined);
  return std::string();
}

}  // namespace

Status join_optimizers(const PathSnapshot& place, const std::string& config, OpenCheckpoint& open) {
  Catalog& catalog = open.reader->catalog();
  if (place.is_file()) TRY(compare_with_model(place, catalog));
  if (place.is_file() || catalog.root != place.path()) return {};
  const std::vector<std::string> beside = optimizers_beside(place, catalog);
  std::string why;
  bool are_named = false;
  for (const std::string& name : beside) {
    auto state = TRY(open_beside([&] { return place.inside(name); }));
    if (!state) continue;
    compare_shapes(place, path_join(place.path(), name), state->reader->catalog(), catalog, catalog.warnings);
    const Catalog& moments = state->reader->catalog();
    const bool is_numbered = !shapes_of_moments(moments).empty();
    are_named = are_named || (!is_numbered && has_moments(moments));
    const bool is_named = has_names_of(catalog, moments);
    if (beside.size() > 1 || !(is_numbered || is_named)) continue;
    why = TRY(join_optimizer(open, *std::move(state), config, is_named));
    if (why.empty()) return {};
  }
  if (!beside.empty())
    catalog.notes.push_back("Not read with the model: " + join(beside, ", ") +
                            (are_named ? ", optimizer state that has other names or shapes than the model"
                                       : ", optimizer state that is stored under parameter numbers without names") +
                            (why.empty() ? "" : ": " + why) + ". It can be opened as a checkpoint of its own.");
  return {};
}

Result<std::string> unfinished_optimizer(const PathSnapshot& place, const Catalog& model) {
  for (const std::string& name : optimizers_beside(place, model)) {
    const PathSnapshot& file = *TRY(place.inside(name));
    const Format* const format = TRY(recognised_format(file));
    if (!format && file.head().empty()) return name;
    if (!format) continue;
    const auto open = format->open(file, {});
    if (!open && open.error().code() == ErrorCode::kCorrupt) return name;
  }
  return std::string();
}

std::string awaited_file(const PathSnapshot& place) {
  constexpr std::string_view kStep = "checkpoint-", kLast = "trainer_state.json", kArguments = "training_args.bin";
  constexpr std::chrono::nanoseconds kTrainerPatience = std::chrono::hours(1), kOtherPatience = std::chrono::minutes(1);
  const std::string name = place.name();
  if (!name.starts_with(kStep) || !is_digits(std::string_view(name).substr(kStep.size())) || place.has_file(kLast))
    return {};
  if (place.has_file(megatron::kLatestFile)) return {};  // Megatron-SWIFT's step, which never has Trainer's file
  // Other programs use this name too. Trainer's arguments follow its model at once, but not FSDP's parts.
  const bool has_arguments = place.has_file(kArguments);
  const bool has_optimizer =
      std::any_of(place.entries().begin(), place.entries().end(),
                  [](const DirectoryEntry& entry) { return entry.name.starts_with("optimizer"); });
  if (has_optimizer && !has_arguments) return {};
  const bool is_trainers = has_arguments || !parts_named(place.entries()).models.empty();
  std::chrono::nanoseconds newest{0};
  for (const DirectoryEntry& entry : place.entries())
    newest = std::max(newest, std::chrono::nanoseconds(entry.mtime_ns));
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  if (newest > now + kTrainerPatience) return {};  // the times are of another clock, and tell nothing
  return now - newest < (is_trainers ? kTrainerPatience : kOtherPatience) ? std::string(kLast) : std::string();
}

namespace {

// Returns the number that `text` begins with, after one of the characters "-_=" or none; nothing if there is none.
std::optional<Index> number_after_word(std::string_view text) {
  if (!text.empty() && std::string_view("-_=").find(text.front()) != std::string_view::npos) text.remove_prefix(1);
  return take_number(text);
}

// Returns the number after the last of a word in a name.
std::optional<Index> number_after(std::string_view name, std::string_view word) {
  for (std::size_t at; (at = name.rfind(word)) != std::string_view::npos; name = name.substr(0, at))
    if (const auto number = number_after_word(name.substr(at + word.size()))) return number;
  return std::nullopt;
}

// Returns the number of batches in the name of a file that Composer's rank 0 saves for all ("ep0-ba20-rank0.pt",
// composer/callbacks/checkpoint_saver.py).
std::optional<Index> batches_of_composer(std::string_view name) {
  if (!name.starts_with("ep") || name.find("-rank0") == std::string_view::npos) return std::nullopt;
  return number_after(name, "-ba");
}

// Returns whether a name has a number after a word for a step.
bool has_step_word(std::string_view name) {
  constexpr std::string_view kWords[] = {"step", "iter", "iteration", "epoch", "ckpt", "checkpoint"};
  return std::any_of(std::begin(kWords), std::end(kWords),
                     [&](std::string_view word) { return number_after(name, word).has_value(); });
}

// Returns whether a file's name is that of a step, and not of one rank's part of it.
bool names_step(std::string_view name) {
  if (batches_of_composer(name)) return true;
  return name.find("rank") == std::string_view::npos && has_step_word(name);
}

// The numbers in a checkpoint's name, in the order in which a run's checkpoints are sorted.
enum class Numbering {
  kNone,    // "final", "unet"
  kNumber,  // "version_9", "2026-01-31", "5": may be a step
  kStep,    // "checkpoint-8", or Lightning's "last.ckpt", whose step is in the file
};

Numbering numbering_of(std::string_view name) {
  if (has_step_word(name) || batches_of_composer(name) || is_last_of_lightning(name)) return Numbering::kStep;
  return name.find_first_of("0123456789") == std::string_view::npos ? Numbering::kNone : Numbering::kNumber;
}

// Returns whether all names begin with a digit: "5", "2026-01-31".
bool begin_with_digits(const std::vector<std::string>& names) {
  return std::all_of(names.begin(), names.end(),
                     [](const std::string& name) { return is_digits(std::string_view(name).substr(0, 1)); });
}

// Returns whether several names differ only in their digits, as "version_9" and "version_10" do.
bool differ_in_numbers(const std::vector<std::string>& names) {
  std::set<std::string> others;
  for (std::string name : names) {
    std::erase_if(name, [](char c) { return is_digits(std::string_view(&c, 1)); });
    others.insert(std::move(name));
  }
  return names.size() > 1 && others.size() == 1;
}

// A directory or a file of a run that may be a checkpoint.
struct RunEntry {
  std::string path, name;
  bool is_directory;
  bool is_last;  // is_last_of_lightning()
  Numbering numbering;
  Index step;  // -1: unknown
};

Result<Index> step_of(const std::string& path, const DirectoryEntry& entry) {
  if (is_last_of_lightning(entry.name))
    return bin::recorded_step(entry.is_directory ? path_join(path, "meta.pt") : path);
  // Without the word, the number of a directory may be a date.
  return entry.is_directory ? number_after(entry.name, "step").value_or(-1) : step_in_name(entry.name);
}

// Returns what may be a checkpoint in a directory, in the order of the steps. This is not the names' natural order
// ("val_loss=2.1-step=100"). Names without a number come first, because a run that is resumed after it saved "final"
// has newer steps.
Result<std::vector<RunEntry>> run_entries(const std::string& directory, const std::vector<DirectoryEntry>& entries) {
  std::vector<RunEntry> out;
  for (const DirectoryEntry& e : entries) {
    const bool is_last = is_last_of_lightning(e.name);
    if (!e.is_directory && !is_last && !names_step(e.name)) continue;
    const std::string path = path_join(directory, e.name);
    const Index step = TRY(step_of(path, e));
    out.push_back({path, e.name, e.is_directory, is_last, numbering_of(e.name), step});
  }
  Index newest = -1;
  for (const RunEntry& entry : out)
    if (!entry.is_last) newest = std::max(newest, entry.step);
  std::erase_if(out, [&](const RunEntry& e) { return e.is_last && !e.is_directory && e.step <= newest; });
  std::sort(out.begin(), out.end(), [](const RunEntry& a, const RunEntry& b) { return natural_less(a.name, b.name); });
  std::stable_sort(out.begin(), out.end(), [](const RunEntry& a, const RunEntry& b) {
    return std::pair(a.numbering, a.step) < std::pair(b.numbering, b.step);
  });
  return out;
}

// Returns false for what cannot be read, such as a directory of somebody else.
Result<bool> is_checkpoint(const std::string& path) {
  const IoFailureWatch watch;
  const auto place = PathSnapshot::look(path);
  const auto format = place ? recognised_format(*place) : Result<const Format*>(place.error());
  if (!format && watch.may_be_io_failure(format.error())) return format.error();
  if (!format || *format || !place->is_directory()) return format && *format;
  const auto parts = parts_of(*place);
  if (!parts && watch.may_be_io_failure(parts.error())) return parts.error();
  return parts && !parts->models.empty();
}

// Returns the paths without links to others of them, such as a "latest" that a trainer moves.
Result<std::vector<std::string>> without_links(std::vector<std::string> paths) {
  std::set<std::string> links, others;
  for (const std::string& path : paths) {
    const auto node = is_url(path) ? std::nullopt : TRY(node_at(path));
    if (node && node->is_link()) links.insert(path);
  }
  if (links.empty()) return paths;
  for (const std::string& path : paths)
    if (!links.contains(path)) others.insert(TRY(real_path(path)));
  std::vector<std::string> out;
  for (std::string& path : paths)
    if (!links.contains(path) || !others.contains(TRY(real_path(path)))) out.push_back(std::move(path));
  return out;
}

// Returns the contents of a directory of a run: none if it may not be listed, or has been removed meanwhile.
Result<std::vector<DirectoryEntry>> list_inside(const std::string& directory) {
  auto entries = list_directory(directory);
  if (!entries && (!TRY(path_exists(directory)) || !TRY(may_be_listed(directory))))
    return std::vector<DirectoryEntry>();
  return entries;
}

// Returns whether one file in a directory is a step. The directory opens as the checkpoint of that file until the run
// saves the next.
Result<bool> holds_one_step(const std::string& directory) {
  std::string step;
  for (const DirectoryEntry& entry : TRY(list_inside(directory))) {
    if (entry.is_directory || !names_step(entry.name)) continue;
    if (!step.empty()) return false;
    step = path_join(directory, entry.name);
  }
  return !step.empty() && TRY(is_checkpoint(step));
}

}  // namespace

bool is_last_of_lightning(std::string_view name) { return name.starts_with("last") && name.ends_with(".ckpt"); }

Index step_in_name(std::string_view name) {
  if (const auto step = number_after(name, "step")) return *step;
  if (const auto batches = batches_of_composer(name)) return *batches;
  const std::size_t end = name.find_last_of("0123456789");
  if (end == std::string_view::npos) return -1;
  std::size_t begin = end;
  while (begin > 0 && is_digits(name.substr(begin - 1, 1))) --begin;
  return parse_number(name.substr(begin, end + 1 - begin)).value_or(-1);
}

Result<std::vector<std::string>> checkpoints_of_run(const std::string& path) {
  forget_stored(path);
  std::vector<std::string> out, level = {path};
  std::size_t seen = 0;
  for (int depth = 0; depth < kMaxRunDepth && out.empty(); ++depth) {
    std::vector<std::string> next;
    for (const std::string& directory : level) {
      const auto entries = TRY(depth == 0 ? list_directory(directory) : list_inside(directory));
      std::vector<RunEntry> found = TRY(run_entries(directory, entries));
      found.erase(found.begin(), found.end() - std::min(found.size(), kMaxSteps - seen));
      seen += found.size();
      for (const RunEntry& entry : found) {
        const bool may_hold_steps = entry.is_directory && !names_step(entry.name) && depth + 1 < kMaxRunDepth;
        if (TRY(is_checkpoint(entry.path)) && !(may_hold_steps && TRY(holds_one_step(entry.path))))
          out.push_back(entry.path);
        if (entry.is_directory) next.push_back(entry.path);
      }
    }
    level = std::move(next);
  }
  return without_links(std::move(out));
}

Result<std::vector<std::string>> sibling_models(const std::string& checkpoint, const std::vector<std::string>& all) {
  const std::string parent = parent_path(checkpoint);
  std::vector<std::string> out;
  Numbering highest = Numbering::kNone;
  std::vector<std::string> numbered;  // names
  for (const std::string& other : all) {
    if (parent_path(other) != parent) continue;
    const std::string name = base_name(other);
    highest = std::max(highest, numbering_of(name));
    if (numbering_of(name) != Numbering::kNone) numbered.push_back(name);
    out.push_back(other);
  }
  if (out.size() < 2 || highest == Numbering::kStep) return std::vector<std::string>();
  const bool is_in_step = numbering_of(base_name(parent)) == Numbering::kStep;
  const bool are_steps = begin_with_digits(numbered) || (!is_in_step && differ_in_numbers(numbered));
  if (highest == Numbering::kNone || !are_steps) return out;
  for (const std::string_view list : {kPipelineFile, kModulesFile})
    if (TRY(path_exists(path_join(parent, list)))) return out;
  return std::vector<std::string>();
}

}  // namespace reshard
