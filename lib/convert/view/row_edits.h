// SPDX-License-Identifier: Apache-2.0
// Edits of a tensor's rows: cut, repeat, pad. They change fragments and read no data, except those that compare rows.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/checkpoint/catalog.h"

namespace reshard {

// Returns the pieces of the fragments in rows [begin, end), moved by `shift` rows.
FragmentList take_rows(const FragmentList& in, int rank, Index begin, Index end, Index shift, Index element_bytes);
void append(FragmentList& to, const FragmentList& from);

// Keeps the first `rows` rows.
void cut_rows(Tensor& tensor, Index rows);
// Keeps the first of each `times` consecutive blocks of `block` rows; the others, which are equal, become replicas.
void merge_blocks(Tensor& tensor, Index block, Index times);
// Repeats each block `times` times, for layouts with more tensor-parallel ranks than key-value heads.
void repeat_blocks(Tensor& tensor, Index block, Index times);

// Reads rows [begin, end) of a located tensor of `view` and returns whether all elements are zero, of either sign.
Result<bool> are_zero(const Catalog& view, FilePool& files, std::size_t tensor, Index begin, Index end);
// Returns how many of the first `rows` rows of two located tensors differ. Both must have the same row shape and dtype.
Result<Index> differing_rows(const Catalog& a, FilePool& a_files, std::size_t a_tensor, const Catalog& b,
                             FilePool& b_files, std::size_t b_tensor, Index rows);

// The values of rows that pad a vocabulary.
enum class PaddingFill { kZero, kRepeatLast, kMean };
std::string_view padding_fill_name(PaddingFill fill);  // "repeat-last"

// Pads `tensor` (an index into `view`) to `rows` rows, at least as many as it has. Optimizer state other than a master
// weight is padded with zeros whatever the fill. `files` is the view's pool; the added row is stored once, in an
// unnamed file in the directory `spool`. Without `look` the mean is not computed, as for a plan.
Status pad_rows(Catalog& view, std::size_t tensor, Index rows, PaddingFill fill, FilePool& files,
                const std::string& spool, bool look);

}  // namespace reshard
