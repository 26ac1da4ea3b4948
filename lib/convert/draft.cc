// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/draft.h"

#include <algorithm>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/shell.h"
#include "lib/base/text.h"
#include "lib/convert/adam.h"
#include "lib/convert/weights/packed_matrix.h"
#include "lib/model/parts.h"
#include "lib/model/view.h"

namespace reshard {
namespace {

// Fails if the source is a delta where a model is expected.
Status check_is_model(const Catalog& source, const ConversionOptions& o) {
  if (source.delta_of.empty() || o.takes_delta) return {};
  return unsupported((o.source_path.empty() ? source.root : printable(o.source_path)) +
                     ": a delta, not a model: it has what changed since " + printable(source.delta_of) +
                     ". Apply it to that model: reshard patch " +
                     (TRY(path_exists(source.delta_of)) ? shell_path(source.delta_of) : "OLD") + " " +
                     shell_path(o.source_path) + " DST");
}

// Returns the same tensors, each in one piece: less to look through if only names and sizes are wanted.
Result<Catalog> in_one_piece(const Catalog& source) {
  Catalog out = source.without_tensors();
  TRY(out.reserve(source.tensors().size()));
  for (const Tensor& stored : source.tensors()) {
    Tensor t = stored;
    t.fragments = t.replicas = FragmentList(t.shape.rank());
    if (t.elements() > 0) t.fragments.add(whole(t.shape), {0, 0, t.bytes()});
    TRY(out.add(std::move(t)));
  }
  return out;
}

Status locate(Reader& source, Unpacking* unpacking, const std::vector<std::size_t>& selected,
              const ConversionOptions& o) {
  if (!unpacking) return source.locate(selected, o.run.threads, o.spool);
  TRY(source.locate(unpacking->operands(selected), o.run.threads, o.spool));
  unpacking->update(source.catalog());
  return {};
}

Result<std::optional<Adapter>> find_adapter(Reader& source, const Format& format, const ConversionOptions& o,
                                            Draft& d) {
  const bool writes_adapter = format.holds_adapter() && d.names.renames();
  const AdapterUse use = o.selection.merge_adapter ? AdapterUse::kMerged
                         : writes_adapter          ? AdapterUse::kWritten
                                                   : AdapterUse::kNone;
  std::optional<Adapter> out = TRY(read_adapter(source, o.adapter, use, o.selection, d.view, d.names));
  if (out) d.notes.warnings.insert(d.notes.warnings.end(), out->notes.begin(), out->notes.end());
  if (out && out->is_merged() && !o.metadata_only) {
    Reader& reader = o.adapter.reader ? *o.adapter.reader : source;
    TRY(reader.locate(out->operands(), o.run.threads, o.spool));
  }
  return out;
}

// Returns the view of the selected tensors.
Result<SourceView> view_selected(const Catalog& catalog, const Selected& selected, Draft& d,
                                 const ConversionOptions& o) {
  const bool keep_unknown = o.selection.keep_unknown;
  if (!o.sizes_only) return view_source(catalog, selected, d.names, keep_unknown, !o.metadata_only, d.notes);
  Translation names = d.names;
  names.hf_rows = false;  // sizes do not depend on the order of rows
  return view_source(TRY(in_one_piece(catalog)), selected, names, keep_unknown, false, d.notes);
}

// Fails if a source of a merge is not plain weights.
Status check_whole(const Draft& draft, const MergeSource& source) {
  if (draft.adapter)
    return unsupported(source.path +
                       ": has an adapter that is not merged into the weights; convert it first, then merge the result");
  const auto& tensors = draft.view.catalog.tensors();
  const auto packed =
      std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& t) { return draft.view.packed.contains(t.name); });
  if (draft.changes.before)
    return unsupported(source.path + ": has " + std::string(info(draft.names.model.convention).title) +
                       ", which have other values than the output; write the same names, then convert the result");
  if (packed == tensors.end() && !draft.requantized.stored && !draft.unpacking) return {};
  const std::string what = draft.names.packed.empty() ? "quantized weights" : packed_text(draft.names.packed);
  return unsupported(source.path + ": has " + what +
                     (packed == tensors.end() ? "" : ", such as " + tensor_text(draft.view.native(packed->name))) +
                     ": packed values and scales cannot be merged; " + advice_to_unpack(draft.names.packed) +
                     ", then merge the result");
}

// Brings Adam's steps into the form of the output's names.
Status convert_steps(Draft& d, Reader& source) {
  if (d.names.renames() && !info(*d.names.to).counters.empty())
    return count_steps_once(d.view, info(*d.names.to).counters, source, source.files());
  return add_steps(d.view, source, source.files());
}

}  // namespace

bool Draft::computes() const {
  return merge || requantized.stored || unpacking || changes.before || (adapter && adapter->is_merged());
}

Status divide_as_source_of(const Draft& draft, Catalog& catalog) {
  if (!draft.names.renames()) return {};
  return divide_columns(catalog, *draft.names.model.family, draft.names.model.convention);
}

namespace {

// Divides columns that the output stores as separate tensors, so that the plan copies boxes of them.
Status divide(Draft& d) {
  if (!d.names.renames()) return {};
  const Catalog before = d.view.catalog;
  TRY(divide_columns(d.view.catalog, *d.names.model.family, *d.names.to));
  if (d.computes() && !std::equal(before.tensors().begin(), before.tensors().end(), d.view.catalog.tensors().begin(),
                                  [](const Tensor& a, const Tensor& b) { return a.columns == b.columns; }))
    d.undivided = std::make_unique<Catalog>(before);
  return {};
}

// Makes the drafts of the other sources of a merge, to the same names, rows and shapes, and matches them with `first`.
Status match_merge(Draft& first, const Format& format, const ConversionOptions& options) {
  const std::vector<MergeSource>& sources = options.merge->sources;
  TRY(check_whole(first, sources[0]));
  std::vector<Draft*> drafts = {&first};
  for (std::size_t s = 1; s < sources.size(); ++s) {
    ConversionOptions of_other = options;
    of_other.merge.reset();
    of_other.takes_delta = options.merge->applies_deltas;
    of_other.source_path = sources[s].path;
    of_other.config_path.clear();
    of_other.donor = nullptr;
    const auto other = std::make_shared<Draft>(TRY(make_draft(*sources[s].reader, format, of_other)));
    TRY(check_whole(*other, sources[s]));
    drafts.push_back(other.get());
    first.others.push_back(other);
  }
  std::vector<const Catalog*> views;
  for (Draft* const draft : drafts) {
    for (const Draft* const other : drafts) TRY(divide_as_source_of(*other, draft->view.catalog));
    views.push_back(&draft->view.catalog);
  }
  first.merge = TRY(match_sources(*options.merge, views));
  return {};
}

}  // namespace

// The steps, in their order. Each sees what the ones before it decided:
//
//   1. Which model it is: config.json, packed weights, the names of the source and those of the output.
//   2. Which tensors take part, and where their bytes are stored.
//   3. The view: the selected tensors under canonical names, as the plan sees them. From here on only the rows that a
//      repair must look at are read.
//   4. Rows: the view gets the shapes of config.json, as far as --repair allows.
//   5. The optimizer: its step, and the float32 master weights that some targets have.
//   6. Values: weights that are dequantized, quantized or changed by an adapter as they are read.
//   7. Rows that the target framework adds: a padded vocabulary, repeated key-value heads. The view is final then.
//   8. Values that the output's convention stores otherwise (value_changes.h).
//   9. The output's names, dtypes and shapes, and their placement on the mesh. Columns are divided as it stores them.
//  10. Files next to the weights: the config, the tokenizer, an adapter that is not merged.
Result<Draft> make_draft(Reader& source, const Format& format, const ConversionOptions& o) {
  Draft d;
  TRY(check_is_model(source.catalog(), o));
  d.config = TRY(read_config_file(source, o, d.notes));
  d.unpacking = TRY(Unpacking::make(source, o, o.run.threads, d.config, d.notes));
  const Catalog& catalog = d.unpacking ? d.unpacking->catalog() : source.catalog();
  TRY(check_has_tensors(catalog));
  d.names = TRY(translate(catalog, o.model, d.config, o.naming, format));
  TRY(check_names(catalog, d.names, o, format, d.config, d.notes));

  const Selected selected = TRY(select(catalog, o.selection, format, o.allow.cover, !o.metadata_only, d.notes));
  if (!o.takes_parts) TRY(check_packed_whole(catalog, selected, d.names.packed));
  if (!o.metadata_only) TRY(locate(source, d.unpacking.get(), selected.tensors, o));

  d.view = TRY(view_selected(catalog, selected, d, o));

  const Model& model = d.names.model;
  RepairOptions repairs{model.family, model.config_or_null(), o.repairs, o.donor, o.metadata_only, o.spool, o.run};
  repairs.run.progress = nullptr;
  if (d.names.renames())
    d.identity = TRY(repair(d.view, source.files(), repairs, selected.complete, o.allow.config, d.notes));
  if (format.write_view) {  // the rest is for outputs that get data of their own
    d.adapter = TRY(find_adapter(source, format, o, d));
    return d;
  }

  if (format.holds == StateSupport::kAdam) {
    TRY(add_masters(d.view, d.notes));
    d.step = TRY(take_steps(d.view, source.files(), o.metadata_only));
  } else if (format.holds != StateSupport::kModel) {
    TRY(convert_steps(d, source));
  }

  d.requantized = TRY(requantize(d.view, d.names, o.selection, o.typing, format, d.notes));
  d.adapter = TRY(find_adapter(source, format, o, d));  // of the weights as requantize() leaves them

  TRY(pad_vocabulary(d.view, source.files(), d.names, o.vocabulary, o.placement, format, repairs, d.notes));
  TRY(repeat_heads(d.view, d.names, o.placement, format, d.notes));
  if (d.unpacking) d.unpacking->note_computed(d.view);

  d.changes = TRY(change_values(d.view, d.names, d.notes));
  d.output = TRY(name_tensors(d.view, d.names, o.typing, d.notes));
  TRY(place(d.output, d.view, model, o.placement, format, d.notes));
  TRY(divide(d));
  if (o.merge) TRY(match_merge(d, format, o));

  d.side_files = TRY(find_side_files(source.catalog(), d.config.path, format, d.notes));
  if (d.adapter && !o.selection.merge_adapter)
    d.side_files.push_back(
        {"adapter/" + std::string(kAdapterConfigFile), d.adapter->config, "", std::ssize(d.adapter->config)});
  return d;
}

}  // namespace reshard
