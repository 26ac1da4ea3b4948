// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/view/source_view.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "lib/base/names.h"
#include "lib/base/shell.h"
#include "lib/base/text.h"
#include "lib/checkpoint/key_paths.h"
#include "lib/model/parts.h"
#include "lib/model/view.h"

namespace reshard {
namespace {

// "extra_state.rank_3.seed" next to "seed": every rank that loads the output asks for the latter.
void note_objects_of_ranks(const Catalog& source, const std::vector<std::size_t>& blobs, ConversionNotes& notes) {
  std::unordered_set<std::string_view> names;
  for (const std::size_t i : blobs) names.insert(source.blobs[i].name);
  std::vector<std::string> own;
  for (const std::size_t i : blobs) {
    std::string_view rest = source.blobs[i].name;
    if (take(rest, "extra_state.rank_") && take_number(rest) && take(rest, ".") && names.contains(rest))
      own.push_back("'" + printable(source.blobs[i].name) + "'");
  }
  if (own.empty()) return;
  const std::string count = count_of(std::ssize(own), "object");
  notes.warnings.push_back(count + (own.size() == 1 ? " is" : " are") + " specific to one rank (" + some_of(own) +
                           "): a job that resumes from the output gets the first rank's object on all ranks, unless " +
                           "it asks for these names");
}

// Notes what verify reports about paths, if the target stores paths.
void note_names_off_paths(const Catalog& source, ConversionNotes& notes) {
  const std::vector<std::string> off = names_off_paths(source);
  if (off.empty()) return;
  const std::string count = count_of(std::ssize(off), "name");
  notes.warnings.push_back(count + (off.size() == 1 ? " is" : " are") +
                           " different from the path in the nested state_dict (" + some_quoted(off) +
                           "): loaders that rebuild the state_dict would put the value elsewhere; the metadata is " +
                           "damaged or comes from an unknown writer");
}

// Says that the selection leaves no tensor: "matches --include 'nothing*'".
std::string nothing_selected(const Selection& s) {
  std::string options;
  for (const std::string& glob : s.include) options += " --include " + shell_word(glob);
  for (const std::string& glob : s.exclude) options += " --exclude " + shell_word(glob);
  return options.empty() ? "can be written to this format" : "matches" + options;
}

}  // namespace

bool selects(const Selection& s, std::string_view name) {
  return (s.include.empty() || any_glob_matches(s.include, name)) && !any_glob_matches(s.exclude, name);
}

namespace {

// Divides the tensors and objects of a source into those that are converted and those that are left out, by reason.
class Selector {
 public:
  Selector(const Catalog& source, const Selection& selection, const Format& format)
      : source_(source), selection_(selection), format_(format), is_faulty_(source.tensors().size()) {}

  void leave_out_faulty(bool files_too, ConversionNotes& notes) {
    const auto& tensors = source_.tensors();
    OmittedState faulty{"incomplete or stored twice (--allow cover)", 0, 0, 0, {}};
    for (const auto& [tensor, error] : tensor_faults(source_, files_too)) {
      is_faulty_[tensor] = true;
      ++faulty.tensors;
      faulty.bytes += tensors[tensor].bytes();
      faulty.names.push_back(tensors[tensor].name);
    }
    if (faulty.tensors == 0) return;
    selected_.complete = false;
    notes.warnings.push_back(
        count_of(faulty.tensors, "tensor") +
        " left out because pieces are missing or stored twice; reshard_manifest.json lists the names");
    notes.left_out.push_back(std::move(faulty));
  }

  void divide_tensors() {
    const auto& tensors = source_.tensors();
    bool holds_model = false;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (is_faulty_[i]) continue;
      if (OmittedState* const left = reason_for(tensors[i])) {
        ++left->tensors;
        left->bytes += tensors[i].bytes();
        continue;
      }
      selected_.tensors.push_back(i);
      holds_model = holds_model || state_kind(tensors[i].key()) == StateKind::kModel;
    }
    // A config describes only models, so it is unknown what is missing of other state.
    selected_.complete = selected_.complete && excluded_.tensors == 0 && holds_model;
  }

  void divide_blobs() {
    for (std::size_t i = 0; i < source_.blobs.size(); ++i) {
      if (OmittedState* const left = reason_for(source_.blobs[i])) {
        ++left->objects;
        left->bytes += source_.blobs[i].extent.length;
      } else {
        selected_.blobs.push_back(i);
      }
    }
  }

  Selected take(ConversionNotes& notes) {
    for (OmittedState* left : {&optimizer_, &average_, &other_, &parts_, &excluded_, &merged_})
      if (left->tensors + left->objects > 0) notes.left_out.push_back(std::move(*left));
    return std::move(selected_);
  }

 private:
  // Returns why a tensor is left out; null if it is converted.
  OmittedState* reason_for(const Tensor& tensor) {
    const StateKind kind = state_kind(tensor.key());
    const bool is_adapters = is_adapter(tensor.key()) && kind != StateKind::kModel;
    if (is_adapters && selection_.merge_adapter) return &merged_;
    const bool stays =
        is_adapters && kind == StateKind::kOther && (format_.holds_adapter() || format_.resumes_training());
    if (!holds(kind) && !stays) {
      if (kind == StateKind::kOptimizer) return &optimizer_;
      if (!selection_.part.empty() && !is_of_part(tensor.key(), selection_.part)) return &parts_;
      const bool is_of_model = std::any_of(source_.parts.begin(), source_.parts.end(), [&](const Part& part) {
        return part.kind == StateKind::kModel && !part.prefix.empty() && tensor.name.starts_with(part.prefix);
      });
      if (is_of_model) return &parts_;
      return is_of_average(source_, tensor.name) ? &average_ : &other_;
    }
    if (!is_of_part(tensor.key(), selection_.part)) return &parts_;
    return selects(selection_, tensor.name) ? nullptr : &excluded_;
  }

  OmittedState* reason_for(const Blob& blob) {
    if (format_.holds != StateSupport::kEverything && !(format_.takes_object && format_.takes_object(blob.key())))
      return state_kind(blob.key()) == StateKind::kOptimizer ? &optimizer_ : &other_;
    if (!is_of_part(blob.key(), selection_.part)) return &parts_;
    return selects(selection_, blob.name) ? nullptr : &excluded_;
  }

  bool holds(StateKind kind) const {
    if (format_.holds == StateSupport::kModel) return kind == StateKind::kModel;
    return format_.holds != StateSupport::kAdam || kind != StateKind::kOther;
  }

  const Catalog& source_;
  const Selection& selection_;
  const Format& format_;
  std::vector<bool> is_faulty_;
  Selected selected_;
  OmittedState optimizer_{"optimizer", 0, 0, 0, {}}, average_{"average of the weights", 0, 0, 0, {}};
  OmittedState other_{"training state", 0, 0, 0, {}}, excluded_{"excluded", 0, 0, 0, {}};
  OmittedState parts_{"other parts", 0, 0, 0, {}}, merged_{"adapter, merged into the weights", 0, 0, 0, {}};
};

}  // namespace

Status check_has_tensors(const Catalog& source) {
  if (!source.tensors().empty()) return {};
  return usage_error(source.where() + ": contains no tensors" +
                     (source.blobs.empty() ? ""
                                           : ", only objects; a model that is pickled as one object "
                                             "(flatten_state_dict=False) is not read"));
}

Result<Selected> select(const Catalog& source, const Selection& selection, const Format& format, bool without_faulty,
                        bool files_too, ConversionNotes& notes) {
  Selector selector(source, selection, format);
  if (without_faulty) selector.leave_out_faulty(files_too, notes);
  selector.divide_tensors();
  selector.divide_blobs();
  Selected out = selector.take(notes);
  note_objects_of_ranks(source, out.blobs, notes);
  if (format.holds == StateSupport::kEverything) note_names_off_paths(source, notes);
  const std::string choice = choice_of_part(source);
  if (out.tensors.empty())
    return usage_error(source.where() + ": no tensor " + nothing_selected(selection) +
                       (choice.empty() ? "" : "; " + choice));
  return out;
}

// ---- the view

bool SourceView::is_stored(const std::string& canonical) const { return natives.contains(canonical); }

const std::string& SourceView::native(const std::string& canonical) const {
  const auto found = natives.find(canonical);
  return found == natives.end() ? canonical : found->second.name;
}

const std::string& SourceView::key(const std::string& canonical) const {
  const auto found = natives.find(canonical);
  return found == natives.end() ? canonical : found->second.key;
}

Status check_packed_whole(const Catalog& source, const Selected& selected, const PackedWeights& packed) {
  if (packed.empty() || selected.tensors.size() == source.tensors().size()) return {};
  const std::unordered_set<std::size_t> taken(selected.tensors.begin(), selected.tensors.end());
  for (const PackedWeight& weight : packed.weights) {
    const auto is_taken = [&](const PackedTensor& part) { return taken.contains(part.tensor); };
    const auto left = std::find_if_not(weight.parts.begin(), weight.parts.end(), is_taken);
    const auto count = std::count_if(weight.parts.begin(), weight.parts.end(), is_taken);
    if (count == 0 || left == weight.parts.end()) continue;
    return usage_error(source.where() + ": " + with_commas(count) + " of the " +
                       count_of(std::ssize(weight.parts), "tensor") + " of '" + printable(weight.name) +
                       "' are selected; packed as " + std::string(packing_title(weight.packing)) +
                       " it is unusable without " + tensor_text(source.tensors()[left->tensor].name) +
                       "; --include or --exclude all of its tensors");
  }
  return {};
}

namespace {

// Fills SourceView::packed. `packed` is of `source`.
void note_packed(const Catalog& source, const Translation& names, SourceView& view) {
  const PackedWeights& packed = names.packed;
  for (std::size_t i = 0; i < source.tensors().size() && !packed.empty(); ++i) {
    if (!packed.is_of(i)) continue;
    const Tensor& t = source.tensors()[i];
    const PackedWeight* const weight = packed.of(i);
    SourceView::Packed part;
    if (weight) part = {weight->name, weight->packing, weight->find("weight") == i || weight->find("values") == i};
    const bool is_raw = weight && !is_known_to_families(weight->packing);  // as canonical_view() names it
    view.packed.emplace(names.renames() && !is_raw             ? canonical_key(*names.model.family, t.key())
                        : names.renames() || names.plain_names ? t.key()
                                                               : t.name,
                        part);
  }
}

// Returns the catalog with the output's names as plain keys.
Result<Catalog> with_output_names(Catalog catalog, const Translation& names) {
  if (names.foreign_prefix.empty()) return catalog;
  Catalog out = catalog.without_tensors();
  TRY(out.reserve(catalog.tensors().size()));
  for (Tensor t : catalog.tensors()) {
    t.plain_key = names.target_name(t.name, t.key());
    TRY(out.add(std::move(t)));
  }
  return out;
}

}  // namespace

bool SourceView::is_known_to_families(const std::string& canonical) const {
  const auto found = packed.find(canonical);
  return found != packed.end() && reshard::is_known_to_families(found->second.packing);
}

Result<SourceView> view_source(const Catalog& source, const Selected& selected, const Translation& names,
                               bool keep_unknown, bool is_located, ConversionNotes& notes) {
  Catalog chosen;
  chosen.root = source.root;
  chosen.files = source.files;
  chosen.vocabulary = source.vocabulary;
  chosen.parts = source.parts;
  if (selected.tensors.size() == source.tensors().size()) {  // all tensors, in the source's order
    chosen.share_tensors(source);
  } else {
    TRY(chosen.reserve(selected.tensors.size()));
    for (const std::size_t i : selected.tensors) TRY(chosen.add(source.tensors()[i]));
  }
  for (const std::size_t i : selected.blobs) chosen.blobs.push_back(source.blobs[i]);
  if (is_located) TRY(validate(chosen));
  SourceView view;
  note_packed(source, names, view);
  if (!names.renames() && !names.plain_names) {
    view.catalog = std::move(chosen);
    return view;
  }
  const Model& model = names.model;
  if (names.plain_names) {
    for (const Tensor& t : chosen.tensors())
      if (std::string name = names.target_name(t.name, t.key()); name != t.name)
        view.natives.emplace(std::move(name), SourceView::SourceName{t.name, t.key()});
    view.catalog = TRY(plain_view(TRY(with_output_names(std::move(chosen), names))));
    return view;
  }
  const auto is_tied = [&](const std::string& canonical) {
    return std::any_of(model.family->rules.begin(), model.family->rules.end(),
                       [&](const NameRule& rule) { return !rule.tied_to.empty() && rule.hf == canonical; });
  };
  for (const Tensor& t : chosen.tensors())
    if (std::string canonical = canonical_key(*model.family, t.key());
        canonical != t.name || canonical != t.key() || is_tied(canonical))
      view.natives.emplace(std::move(canonical), SourceView::SourceName{t.name, t.key()});
  std::vector<std::string> dropped;
  const ViewOptions how{model.family, model.config_or_null(), names.hf_rows, keep_unknown, false, model.convention};
  std::vector<std::string> reshaped;
  view.catalog = TRY(canonical_view(chosen, how, &dropped, &reshaped));
  if (!reshaped.empty())
    notes.warnings.push_back(count_of(std::ssize(reshaped), "tensor") + (reshaped.size() == 1 ? " is" : " are") +
                             " flattened, as FSDP stores parameters (" + some_of(reshaped) +
                             "); written in the shape that " + model.config->path + " gives");
  if (!dropped.empty()) {
    OmittedState out{
        "derived tensors or the trainer's own (" + dropped.front() + (dropped.size() > 1 ? ", ..." : "") + ")", 0, 0,
        0};
    for (const std::string& name : dropped) {
      ++out.tensors;
      out.bytes += chosen.tensors()[*chosen.find(name)].bytes();
    }
    notes.left_out.push_back(std::move(out));
  }
  return view;
}

}  // namespace reshard
