// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/view/repair.h"

#include <algorithm>
#include <map>

#include "lib/audit/replicas.h"
#include "lib/base/text.h"
#include "lib/checkpoint/state_key.h"
#include "lib/convert/view/row_edits.h"
#include "lib/model/packing.h"
#include "lib/model/parameters.h"
#include "lib/model/view.h"

namespace reshard {
namespace {

// Repairs one view.
class Fitter {
 public:
  Fitter(Catalog& view, FilePool& files, const RepairOptions& options)
      : view_(view), files_(files), options_(options) {}

  Result<RepairResult> fit() {
    for (const Parameter& p : TRY(parameters(*options_.family, *options_.config))) expected_.emplace(p.name, p);
    TRY(split_experts());
    TRY(merge_heads());
    TRY(fit_vocabulary());
    return std::move(out_);
  }

 private:
  // Returns the parameter that a tensor is, or is optimizer state of; null for other tensors.
  const Parameter* parameter_of(const Tensor& tensor) const {
    const StateKey key = split_state_key(tensor.key());
    const auto found = expected_.find(key.parameter);
    return found == expected_.end() ? nullptr : &found->second;
  }

  // Returns the name of a tensor for people and for the manifest. For a tied head that the source does not store, that
  // is the name of the embedding.
  std::string shown(const Tensor& tensor) const {
    const Parameter* p = parameter_of(tensor);
    if (!p || p->rule->tied_to.empty() || !options_.is_stored || options_.is_stored(tensor.name)) return tensor.name;
    const StateKey key = split_state_key(tensor.key());
    return key.prefix + p->rule->tied_to + key.suffix;
  }

  void add_name(std::vector<std::string>& names, const Tensor& tensor) const {
    std::string name = shown(tensor);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  }

  static Json range(Index begin, Index end) {
    Json out = Json::array();
    out.push_back(begin);
    out.push_back(end);
    return out;
  }

  void record(std::string_view what, const std::vector<std::string>& tensors, Json details = Json::object()) {
    Json names = Json::array();
    for (const std::string& name : tensors) names.push_back(name);
    details.set("what", what).set("tensors", std::move(names));
    out_.repairs.push_back(std::move(details));
  }

  static std::string named(const std::vector<std::string>& tensors) {
    return tensors.size() == 1 ? printable(tensors.front())
                               : printable(tensors.front()) + " and " + count_of(std::ssize(tensors) - 1, "other");
  }

  // ---- experts: with expert-parallel groups, key i of k keys holds the rows of experts i, i + k, i + 2 k, ...
  // (ColossalAI's MoE plugin, unsharded save)

  Status split_experts() {
    struct Joined {
      std::size_t tensor;
      ParsedName name;
      StateKey key;
      Index times;
    };
    std::vector<Joined> joined;
    Index present = 0;
    for (std::size_t i = 0; i < view_.tensors().size(); ++i) {
      const Tensor& t = view_.tensors()[i];
      StateKey key = split_state_key(t.key());
      const auto parsed = key.parameter.empty() ? std::nullopt : parse_name(*options_.family, key.parameter);
      const Parameter* p = parameter_of(t);
      if (!parsed || parsed->expert < 0 || !p || t.shape.rank() != p->shape.rank() || t.shape.rank() == 0) continue;
      present = std::max(present, parsed->expert + 1);
      if (t.shape[0] == p->shape[0] || t.shape[0] % p->shape[0] != 0) continue;
      joined.push_back({i, *parsed, std::move(key), t.shape[0] / p->shape[0]});
    }
    const Index experts = options_.config->number("num_experts");
    std::erase_if(joined, [&](const Joined& j) { return j.times * present != experts; });
    if (joined.empty()) return {};
    const std::string what = count_of(std::ssize(joined), "tensor") + " (" +
                             printable(view_.tensors()[joined[0].tensor].name) + ", ...) contain the rows of " +
                             count_of(joined[0].times, "expert") + " each: expert-parallel groups saved unsharded, " +
                             "under the names of experts 0 to " + with_commas(present - 1) + " of " +
                             with_commas(experts);
    if (!options_.repairs.experts) return corrupt(view_.where() + ": " + what + "; add --repair experts to split them");
    std::map<std::size_t, const Joined*> by_tensor;
    for (const Joined& j : joined) by_tensor.emplace(j.tensor, &j);
    Catalog out = view_.without_tensors();
    std::vector<std::string> names;
    for (std::size_t i = 0; i < view_.tensors().size(); ++i) {
      const Tensor& t = view_.tensors()[i];
      const auto found = by_tensor.find(i);
      if (found == by_tensor.end()) {
        TRY(out.add(t));
        continue;
      }
      const Joined& j = *found->second;
      PackedPart part{{}, t.shape, -1, {}, false, 1};
      part.shape[0] = t.shape[0] / j.times;
      for (Index block = 0; block < j.times; ++block) {
        part.rows = {{0, block * part.shape[0], part.shape[0], 1}};
        ParsedName name = j.name;
        name.expert += block * present;
        TRY(out.add(unpack(t, part, j.key.prefix + canonical_name(name) + j.key.suffix)));
      }
      names.push_back(t.name);
    }
    view_ = std::move(out);
    view_.sort_by_name();
    out_.notes.push_back(what + ". They are split.");
    record("experts split", names);
    return {};
  }

  // ---- key-value heads that several ranks hold

  Status merge_heads() {
    std::vector<std::string> names;
    Index times = 1;
    Catalog copies;
    copies.root = view_.root;
    copies.files = view_.files;
    for (std::size_t i = 0; i < view_.tensors().size(); ++i) {
      Tensor& t = view_.tensor(i);
      const Parameter* p = parameter_of(t);
      if (!p || p->rule->heads != "num_key_value_heads" || p->rule->tp_dim != 0) continue;
      if (t.shape.rank() != p->shape.rank() || t.shape.rank() == 0 || t.shape[0] <= p->shape[0]) continue;
      if (t.shape[0] % p->shape[0] != 0) continue;
      times = t.shape[0] / p->shape[0];
      merge_blocks(t, p->shape[0] / options_.config->num_key_value_heads(), times);
      TRY(copies.add(t));
      names.push_back(t.name);
    }
    if (names.empty()) return {};
    if (!options_.metadata_only) {
      TRY(validate(copies).context("replicated heads"));
      const ReplicaReport report = TRY(compare_replicas(copies, files_, options_.run));
      for (const Finding& f : report.findings)
        if (f.severity == Severity::kError)
          return corrupt(view_.where() + ": " + tensor_text(f.tensors.front()) + " has " + with_commas(times) +
                         " times the rows that " + options_.config->path +
                         " expects, but they are not equal copies of " + "each key-value head: " + f.what);
    }
    out_.notes.push_back("Each key-value head is stored " + with_commas(times) +
                         " times; the copies are equal and one is kept (" + named(names) + ").");
    record("copies of key-value heads left out", names, Json::object().set("times", times));
    return {};
  }

  // ---- the vocabulary

  Status fit_vocabulary() {
    const Index size = options_.config->vocab_size();
    const bool is_told = view_.vocabulary == size;  // the writer recorded it, so rows beyond it are padding
    std::vector<std::string> cut, cut_told, cut_other;
    Index rows = 0;
    for (std::size_t i = 0; i < view_.tensors().size(); ++i) {
      const Tensor& t = view_.tensors()[i];
      const Parameter* p = parameter_of(t);
      if (!p || !p->rule->is_vocabulary() || t.shape.rank() != p->shape.rank() || t.shape[0] == size) continue;
      if (Dims same = t.shape; (same[0] = size, same != p->shape)) continue;
      if (t.shape[0] < size) {
        TRY(complete(i, size));
        continue;
      }
      rows = t.shape[0];
      const bool zero = !is_told && (options_.metadata_only || TRY(are_zero(view_, files_, i, size, rows)));
      if (!zero && !is_told && !options_.repairs.vocabulary)
        return corrupt(tensor_text(shown(t)) + ": " + options_.config->path + " expects a vocabulary of " +
                       with_commas(size) + ", got " + count_of(rows, "row") +
                       ", and the rows beyond it are not zero: padding of a framework that initialises it, " +
                       "or an enlarged vocabulary. Add --repair vocab to cut them");
      add_name(zero ? cut : is_told ? cut_told : cut_other, t);
      cut_rows(view_.tensor(i), size);
    }
    report_cut(cut, size, rows, "rows of zeros");
    report_cut(cut_told, size, rows, "rows of padding");
    report_cut(cut_other, size, rows, "rows that are not zeros");
    return {};
  }

  void report_cut(const std::vector<std::string>& tensors, Index size, Index rows, std::string_view what) {
    if (tensors.empty()) return;
    out_.notes.push_back(with_commas(rows - size) + " " + std::string(what) + " beyond the vocabulary of " +
                         with_commas(size) + (options_.metadata_only ? " would be" : " are") + " cut from " +
                         named(tensors) + ".");
    record("vocabulary padding cut", tensors,
           Json::object().set("rows", range(size, rows)).set("zeros", what == "rows of zeros"));
  }

  // Takes rows that the source lost from the donor.
  Status complete(std::size_t i, Index size) {
    const Tensor& t = view_.tensors()[i];
    const Index rows = t.shape[0];
    const std::string lost = tensor_text(shown(t)) + ": " + options_.config->path + " expects " +
                             count_of(size, "row") + ", got " + with_commas(rows) + ": rows " + with_commas(rows) +
                             " to " + with_commas(size - 1) + " are missing from this checkpoint";
    if (!options_.repairs.vocabulary || !options_.donor)
      return corrupt(lost +
                     "; add --repair vocab --donor CKPT to take them from another checkpoint, such as the base model");
    const Catalog& donor = TRY(donor_view());
    const auto found = donor.find(t.name);
    if (!found) return corrupt(lost + ", and " + donor.root + " has no such tensor");
    const Tensor& d = donor.tensors()[*found];
    Dims expected = t.shape;
    expected[0] = size;
    if (d.shape != expected || d.dtype != t.dtype)
      return corrupt(lost + "; expected the donor " + donor.root + " to have it as " + to_string(expected) + " of " +
                     std::string(info(t.dtype).torch_name) + ", got " + to_string(d.shape) + " of " +
                     std::string(info(d.dtype).torch_name));
    Index different = 0;
    if (!options_.metadata_only)
      different = TRY(differing_rows(view_, files_, i, donor, options_.donor->files(), *found, rows));
    append_donor_rows(i, donor, d, rows, size);
    out_.notes.push_back(
        count_of(size - rows, "row") + " of " + printable(shown(t)) + " come from " + donor.root + ". " +
        (options_.metadata_only ? "The other rows were not compared with the donor's."
         : different == 0       ? "The other rows equal the donor's, so the tensor was frozen and is now complete."
                                : with_commas(different) + " of the " + with_commas(rows) +
                                " other rows differ from the donor's: they were trained, the added rows were not."));
    record(
        "rows of a donor", {shown(t)},
        Json::object().set("donor", donor.root).set("rows", range(rows, size)).set("own_rows_that_differ", different));
    return {};
  }

  Result<std::reference_wrapper<const Catalog>> donor_view() {
    if (donor_) return std::cref(*donor_);
    Reader& donor = *options_.donor;
    std::vector<std::size_t> wanted;
    for (std::size_t i = 0; i < donor.catalog().tensors().size(); ++i) {
      const StateKey key = split_state_key(donor.catalog().tensors()[i].key());
      const auto parsed = key.kind == StateKind::kModel ? parse_name(*options_.family, key.parameter) : std::nullopt;
      if (parsed && parsed->rule->is_vocabulary()) wanted.push_back(i);
    }
    if (!options_.metadata_only) TRY(donor.locate(wanted, options_.run.threads, options_.spool));
    Catalog only;
    only.root = donor.catalog().root;
    only.files = donor.catalog().files;
    for (const std::size_t i : wanted) TRY(only.add(donor.catalog().tensors()[i]));
    donor_ = TRY(canonical_view(only, {options_.family, options_.config, true, true}, nullptr));
    return std::cref(*donor_);
  }

  void append_donor_rows(std::size_t i, const Catalog& donor, const Tensor& from, Index begin, Index end) {
    Tensor& t = view_.tensor(i);
    const FragmentList rows = take_rows(from.fragments, from.shape.rank(), begin, end, 0, byte_size(from.dtype));
    for (std::size_t k = 0; k < rows.size(); ++k) {
      Fragment f = rows.get(k);
      const auto [slot, is_new] = donor_files_.try_emplace(f.extent.file, 0);
      if (is_new) slot->second = add_donor_file(donor, f.extent.file);
      f.extent.file = slot->second;
      t.fragments.add(f);
    }
    t.shape[0] = end;
  }

  std::uint32_t add_donor_file(const Catalog& donor, std::uint32_t file) {
    const std::string path = donor.file_path(file);
    const auto number = static_cast<std::uint32_t>(view_.files.size());
    view_.files.push_back({"(donor) " + path, donor.files[file].size});
    if (auto opened = File::open(path)) files_.pin(view_.file_path(number), *std::move(opened));
    return number;
  }

  Catalog& view_;
  FilePool& files_;
  const RepairOptions& options_;
  RepairResult out_;
  std::map<std::string, Parameter, std::less<>> expected_;
  std::optional<Catalog> donor_;
  std::map<std::uint32_t, std::uint32_t> donor_files_;  // the donor's number of a file -> the view's
};

}  // namespace

Result<RepairResult> repair_to_config(Catalog& view, FilePool& files, const RepairOptions& options) {
  Catalog fitted = view;  // so that an error leaves the view unchanged
  RepairResult done = TRY(Fitter(fitted, files, options).fit());
  view = std::move(fitted);
  return done;
}

}  // namespace reshard
