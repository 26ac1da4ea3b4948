// Rows of tensors: cut, repeated, padded, and looked at. All but the looking moves boxes, and no bytes.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

// The pieces of the fragments that lie in rows [begin, end), moved by `shift` rows.
FragmentList take_rows(const FragmentList& in, int rank, Index begin, Index end, Index shift, Index element_bytes);
void append(FragmentList& to, const FragmentList& from);

// Leaves the first `rows`.
void cut_rows(Tensor& tensor, Index rows);
// Of `times` equal blocks of `block` rows in a row the first is kept, and the others become replicas.
void merge_blocks(Tensor& tensor, Index block, Index times);
// The other way: each block is there `times` times, as ranks hold key-value heads that are fewer than they are.
void repeat_blocks(Tensor& tensor, Index block, Index times);

// Whether rows [begin, end) of a located tensor of `view` are zeros, of either sign.
Result<bool> are_zero(const Catalog& view, FilePool& files, std::size_t tensor, Index begin, Index end);
// How many of the first `rows` rows of two located tensors of equal row shape and dtype differ.
Result<Index> differing_rows(const Catalog& a, FilePool& a_files, std::size_t a_tensor, const Catalog& b,
                             FilePool& b_files, std::size_t b_tensor, Index rows);

// What the rows beyond the true vocabulary become.
enum class PaddingFill { kZero, kRepeatLast, kMean };
std::optional<PaddingFill> padding_fill(std::string_view name);  // "zero", "repeat-last", "mean"
std::string_view padding_fill_name(PaddingFill fill);

// Gives `tensor` (an index into `view`) `rows` rows, at least as many as it has. Moments of an optimizer, and other
// state that is no master of a weight, get zeros whatever the fill. `files` is the view's pool; the row that all of
// them are lies in an unnamed file in the directory `spool`. Without `look` a mean is not computed, as for a plan.
Status pad_rows(Catalog& view, std::size_t tensor, Index rows, PaddingFill fill, FilePool& files,
                const std::string& spool, bool look);

}  // namespace reshard
